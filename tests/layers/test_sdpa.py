"""Causal attention by torch: each kernel against the formula in float64, and what is said of those that cannot run."""

import math
import warnings

import pytest
import torch

from gpt2_fp8.config.block_spec import Heads
from gpt2_fp8.layers import sdpa

HEADS = Heads(n_head=4, n_kv_head=2, size=8)


def parts(dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    numbers = (HEADS.n_head, HEADS.n_kv_head, HEADS.n_kv_head)
    return [
        torch.randn(2, 16, n, HEADS.size, generator=generator).to(dtype).requires_grad_(requires_grad) for n in numbers
    ]


def formula(q, k, v):
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS.n_head // HEADS.n_kv_head, dim=2) for x in (k, v))
    scores = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(HEADS.size)
    later = torch.ones(16, 16, dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhc->bihc", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(2)


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "math", "flash"])
def test_attention_is_the_formulas(kernel):
    """A CPU has a kernel under the name of FlashAttention, so that holding torch to one is tried here too."""
    q, k, v = parts()
    if kernel == "flash":
        k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    torch.testing.assert_close(sdpa.causal(q, k, v, 0.0, kernel).double(), formula(*parts()), rtol=1e-5, atol=1e-6)


def test_the_formula_takes_a_mask_and_is_named():
    mask = torch.zeros(2, 1, 16, 16).masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -torch.inf)
    masked, plain = sdpa.causal(*parts(), 0.0, "math", mask), sdpa.causal(*parts(), 0.0, "math")
    torch.testing.assert_close(masked, plain, rtol=1e-5, atol=1e-6)
    assert sdpa.why_not("math", HEADS, 16, 0.1) is None
    assert sdpa.kernels("math", HEADS, 16, 0.0, torch.float32, "cpu") == "torch's unfused kernel, as asked"


def test_torch_chooses_the_same_for_auto_and_sdpa_bit_for_bit():
    found = []
    for kernel in ("auto", "sdpa"):
        q, k, v = parts(requires_grad=True)
        sdpa.causal(q, k, v, 0.0, kernel).square().sum().backward()
        found.append([q.grad, k.grad, v.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_kernel_that_cannot_run_raises_and_no_other_takes_its_place():
    with pytest.raises(RuntimeError, match=r"No (available|viable)"):
        sdpa.causal(*parts(), 0.0, "cudnn")


@pytest.mark.parametrize(
    ("kernel", "dropout", "masked", "said"),
    [
        ("auto", 0.0, False, "flash kernel"),
        ("sdpa", 0.2, False, "unfused kernel"),
        ("cudnn", 0.0, False, "cuDNN kernel, as asked"),
        ("flash", 0.0, False, "flash kernel, as asked"),
        ("sdpa", 0.0, True, "flash kernel"),
        ("sdpa", 0.1, True, "unfused kernel"),
    ],
)
def test_kernels_are_named(kernel, dropout, masked, said):
    assert sdpa.kernels(kernel, Heads(4, 4, 8), 16, dropout, torch.float32, "cpu", masked) == f"torch's {said}"


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_why_a_kernel_cannot_run_is_told_in_torchs_words(monkeypatch, kernel):
    asked, one = [], sdpa._one

    def can_use(parameters, debug):
        asked.append((tuple(parameters.query.shape), parameters.dropout, parameters.is_causal, parameters.enable_gqa))
        assert debug
        warnings.warn("Head dim 512 is too large. (Triggered internally at x.cpp:1.)", stacklevel=1)
        return False

    monkeypatch.setattr(sdpa, f"can_use_{'cudnn' if kernel == 'cudnn' else 'flash'}_attention", can_use)
    monkeypatch.setattr(sdpa, "_one", lambda heads, tokens, dtype, device: one(heads, tokens, dtype, "cpu"))
    assert sdpa.why_not(kernel, HEADS, 16, 0.1) == "Head dim 512 is too large"
    assert asked == [((1, 4, 16, 8), 0.1, True, True)]
