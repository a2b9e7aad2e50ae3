"""Which way a micro-batch's rows go through the fused head, of chunks whose kernels do not run."""

from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8.config.block_spec import MLP, BlockSpec, Norm, gpt2_heads
from gpt2_fp8.layers.delayed_scaling import Scales
from tests.layers.standins import SCALING, families


@pytest.fixture(scope="module")
def head():
    with families():
        from gpt2_fp8.layers import head

        yield head


@pytest.mark.parametrize(
    ("chunks", "width", "expected"),
    [
        ([16384], 768, True),
        ([16384, 16384], 1024, True),
        ([16384, 64], 768, True),
        ([8192, 8192], 768, True),  # they count together
        ([16320], 768, False),  # too few
        ([16384, 80], 768, False),  # the last has no whole tiles
        ([8208, 8240], 768, False),  # nor have these, though both together would
        ([16384], 1280, False),
    ],
)
def test_probabilities_are_of_micro_batches_whose_every_chunk_fits(head, chunks, width, expected):
    empty = lambda rows: torch.empty(rows, width, dtype=torch.float8_e4m3fn, device="meta")  # noqa: E731
    of = SimpleNamespace(linear=SimpleNamespace(w8=empty(50304)))
    given = [head.Chunk(of, empty(rows), None, 50257, slice(0, rows)) for rows in chunks]
    assert head.fit_without_logits(given) is expected


@pytest.mark.parametrize(
    ("rows", "n_embd", "exponent"),
    [
        (65536, 768, 11),
        (16384, 1024, 11),
        (16320, 768, 15),  # too few rows
        (16400, 768, 15),  # no multiple of 64
        (65536, 1280, 15),  # too wide
    ],
)
def test_the_factor_is_that_of_the_way_it_goes(head, rows, n_embd, exponent):
    of = SimpleNamespace(weight=torch.empty(50304, n_embd, device="meta"))
    assert head.Head.gradient_factor(of, rows) == 2.0**exponent


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_gradients_go_to_their_parameters_and_add_up(head, norm, monkeypatch):
    """Of two micro-batches, whose losses are weighted; the embedding's gradient may come between them."""

    def trained(chunk, gradients):
        gradients.dx.fill_(1.0)
        gradients.weight.fill_(2.0)
        for i, vector in enumerate(gradients.norm):
            vector.fill_(3.0 + i)
        return head._Known(torch.ones(4), None)

    monkeypatch.setattr(head, "fit_without_logits", lambda chunks: False)
    monkeypatch.setattr(head, "_train_with_logits", trained)
    monkeypatch.setattr(head, "scale_", lambda gradient, factor: gradient.mul_(factor))
    spec = BlockSpec(
        n_embd=16, norm=Norm(norm, 1e-5), heads=gpt2_heads(2, 16), mlp=MLP("gelu", 32), positions="learned",
        bias=True, dropout=0.0, tied=True,
    )  # fmt: skip
    made = head.Head(spec, 32, Scales(SCALING))
    made.linear.refresh = lambda *_: None
    for factor in (10.0, 100.0):
        x = torch.randn(1, 4, 16, requires_grad=True)
        (factor * made.loss(x, torch.zeros(1, 4, dtype=torch.long), 30, 1.0, True)).backward()
        assert x.grad.unique().tolist() == [factor]
        made.weight.grad += 0.5
    found = {name: parameter.grad.unique().tolist() for name, parameter in made.named_parameters()}
    bias = {"layer_norm_bias": [440.0]} if norm == "layer_norm" else {}
    assert found == {"weight": [221.0], "layer_norm_weight": [330.0], **bias}
