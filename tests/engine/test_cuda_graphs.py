"""What of recording CUDA graphs can be seen without a GPU: the order of things where memory runs out."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8.engine import cuda_graphs
from gpt2_fp8.engine.cuda_graphs import GraphedGradients
from tests.common import ids
from tests.layers.test_delayed_scaling import Model, see


def test_scales_are_put_back_after_all_that_the_other_stream_had_to_do(monkeypatch):
    """The passes run on a stream of their own. Where one runs out of memory, what it has launched still writes."""
    monkeypatch.setattr(cuda_graphs, "_stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    model, late = Model(), []
    before = model.scales.history.clone()

    def loss_of(part, first, scale):
        late.append(lambda: see(model.scales, 9, 9, 9))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: [write() for write in late])
    with pytest.raises(torch.OutOfMemoryError):
        GraphedGradients(model, loss_of, nullcontext)((ids(2), ids(2)))
    assert late
    assert torch.equal(model.scales.history, before)


def test_random_numbers_that_a_recording_draws_are_given_back(monkeypatch):
    """cuDNN's attention draws some even without dropout: a run that is continued would draw more than one that is
    not."""
    kept, drawn = [], []

    @contextmanager
    def fork_rng(devices):
        kept.append(devices)
        yield
        kept.append("given back")

    monkeypatch.setattr(cuda_graphs, "_stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: drawn.append("replayed")))
    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    model = Model()

    def loss_of(part, first, scale):
        drawn.append(list(kept))
        return model(part, first) * scale

    GraphedGradients(model, loss_of, nullcontext)((ids(2), ids(2)))
    assert drawn == [[[3]]] * (2 * cuda_graphs.WARM_UP + 2) + ["replayed"] * 2
    assert kept == [[3], "given back"]
