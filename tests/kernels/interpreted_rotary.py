"""QK-norm and RoPE of packed heads in Triton's interpreter, which needs no GPU, against float64: see `test_rotary`."""

import pytest
import torch

from gpt2_fp8.config.block_spec import RoPE
from gpt2_fp8.kernels import rotary
from gpt2_fp8.layers.reference import angles, rotate

EPSILON = 1e-3
BATCH, TOKENS = 2, 37  # 74 rows: no multiple of a program's
TRUNCATED = 2.0**-7  # the interpreter leaves out bfloat16's last bits instead of rounding them
NOISE = 1e-5  # of float32, beside numbers around 1 that cancel
CASES = [
    (2, 2, 64, True, True), (2, 2, 128, True, True), (2, 2, 64, True, False), (3, 3, 128, False, True),
    (2, 2, 80, True, True), (4, 2, 64, True, True), (3, 1, 16, False, True), (1, 1, 17, True, False),
]  # fmt: skip
every = pytest.mark.parametrize(("queries", "keys", "size", "norm", "rope"), CASES)


class Case:
    """Inputs of a call, and what it should give in float64."""

    def __init__(self, queries, keys, size, norm, rope):
        generator = torch.Generator().manual_seed(size + queries)
        self.heads, self.size = [queries, keys, keys], size
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.packed = normal(BATCH, TOKENS, sum(self.heads) * size).bfloat16()
        self.norms = (normal(size), normal(size)) if norm else ()
        for weight in self.norms:
            weight[3] = 0.0  # nothing is divided by it
        angle = angles(RoPE(1e4), size, TOKENS, torch.device("cpu")) if rope else None
        self.turns = rotary.Turns.of(angle) if rope else None
        self.given = self.turns, self.norms, EPSILON
        x, weights = self.packed.double().requires_grad_(), [w.double().requires_grad_() for w in self.norms]
        exact = list(self.split(x))
        for i in range(2):
            exact[i] = torch.nn.functional.rms_norm(exact[i], (size,), weights[i], EPSILON) if norm else exact[i]
            exact[i] = rotate(exact[i], angle) if rope else exact[i]
        self.upstream = [normal(*part.shape).bfloat16() for part in exact]
        self.gradient, *self.of_norms = torch.autograd.grad(exact, [x, *weights], [g.double() for g in self.upstream])
        self.prepared = [part.detach() for part in exact[:2]]

    def split(self, packed):
        return packed.unflatten(2, (-1, self.size)).split(self.heads, 2)


def assert_bf16(got, exact):
    assert got.dtype == torch.bfloat16
    assert torch.all((got.double() - exact).abs() <= TRUNCATED * exact.abs() + NOISE)


@every
def test_forward(queries, keys, size, norm, rope):
    case = Case(queries, keys, size, norm, rope)
    before = case.packed.clone()
    for got, exact in zip(rotary.prepare_heads(case.packed, queries, keys, *case.given), case.prepared, strict=True):
        assert got.is_contiguous()
        assert_bf16(got, exact)
    assert torch.equal(case.packed, before)


@every
def test_backward(queries, keys, size, norm, rope):
    """In place, from gradients apart, and from ones of other strides: the same bits."""
    case = Case(queries, keys, size, norm, rope)
    in_place = torch.cat(case.upstream, 2).flatten(2)
    sums = rotary.prepare_heads_backward(*case.split(in_place)[:2], case.packed, in_place, *case.given)
    assert_bf16(in_place, case.gradient)
    assert torch.equal(case.split(in_place)[2], case.upstream[2]), "of values: left as it is"
    if norm:
        assert sums.shape[1:] == (2, size)
        for got, exact in zip(sums.double().sum(0), case.of_norms, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-4)  # float32 sums of up to 296 numbers
    dq, dk, _ = case.upstream
    for one, other in ((dq, dk), (dq.transpose(1, 2).contiguous().transpose(1, 2), dk.mT.contiguous().mT)):
        assert one.stride(3) == 1
        apart = torch.full_like(in_place, torch.nan)
        again = rotary.prepare_heads_backward(one, other, case.packed, apart, *case.given)
        for i in range(2):
            assert torch.equal(case.split(apart)[i], case.split(in_place)[i])
        assert case.split(apart)[2].isnan().all()
        if norm:
            assert torch.equal(again, sums)
