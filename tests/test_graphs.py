"""What of recording CUDA graphs can be seen without a GPU: the order of things where memory runs out."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8 import graphs
from gpt2_fp8.graphs import GraphedGradients
from tests.common import ids
from tests.test_scales import Model, see


def test_scales_are_put_back_after_all_that_the_other_stream_had_to_do(monkeypatch):
    """The passes run on a stream of their own. Where one runs out of memory, what it has launched still writes."""
    monkeypatch.setattr(graphs, "_stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
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
