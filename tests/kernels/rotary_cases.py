"""QK-norm and RoPE of packed heads: calls of the kernels, and what they should give, in float64.

For Triton's interpreter on a CPU (`interpreted_rotary`) and for a GPU (tests/gpu/test_rotary.py).
"""

import torch

from gpt2_fp8.config.block_spec import RoPE
from gpt2_fp8.layers.reference import angles, rotate

EPSILON = 1e-3
NOISE = 2.0**-19  # of the largest number: what some ten float32 operations, one of them an approximate root, are off by
# heads of queries, of keys, their size; QK-norm, RoPE
CASES = [
    (2, 2, 64, True, True), (2, 2, 128, True, True), (2, 2, 64, True, False), (3, 3, 128, False, True),
    (2, 2, 80, True, True), (4, 2, 64, True, True), (3, 1, 16, False, True), (1, 1, 17, True, False),
]  # fmt: skip


class Case:
    """Inputs of a call, and what it should give in float64."""

    def __init__(self, queries, keys, size, norm, rope, batch=2, tokens=37, device="cpu", seed=0):
        from gpt2_fp8.kernels.rotary import Turns

        generator = torch.Generator(device).manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
        self.heads, self.size, self.addends = [queries, keys, keys], size, batch * tokens * queries
        self.packed = normal(batch, tokens, sum(self.heads) * size).bfloat16()
        self.norms = (normal(size), normal(size)) if norm else ()
        for weight in self.norms:
            weight[3] = 0.0  # nothing is divided by it
        angle = angles(RoPE(1e4), size, tokens, torch.device(device)) if rope else None
        self.turns = Turns.of(angle) if rope else None
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

    def check_forward(self, prepare_heads, rounding):
        """`rounding`: how far bfloat16 may be from a number, as a part of it."""
        before = self.packed.clone()
        q, k = prepare_heads(self.packed, *self.heads[:2], *self.given)
        for got, exact in zip((q, k), self.prepared, strict=True):
            assert_bf16(got, exact, rounding)
        packed = prepare_heads(self.packed, *self.heads[:2], *self.given, values=True)
        for got, same, of_packed in zip(packed, (q, k, self.split(before)[2]), self.split(before), strict=True):
            assert torch.equal(got, same)
            assert (got.stride(), got.storage_offset()) == (of_packed.stride(), of_packed.storage_offset())
        assert torch.equal(self.packed, before)

    def check_backward(self, prepare_heads_backward, rounding):
        """In place, from gradients apart, and from ones of other strides: the same bits."""
        in_place, packed = torch.cat(self.upstream, 2).flatten(2), self.packed.clone()
        sums = prepare_heads_backward(*self.split(in_place)[:2], packed, in_place, *self.given)
        assert torch.equal(packed, self.packed)
        assert_bf16(in_place, self.gradient, rounding)
        assert torch.equal(self.split(in_place)[2], self.upstream[2]), "of values: left as it is"
        if self.norms:
            assert sums.shape[1:] == (2, self.size)
            for got, exact in zip(sums.double().sum(0), self.of_norms, strict=True):
                # of each addend, about 1, what its operations are off by; the largest are products of 4 and 4
                torch.testing.assert_close(got, exact, rtol=1e-5, atol=(self.addends + 64) * 2.0**-22)
        dq, dk, _ = self.upstream
        for one, other in ((dq, dk), (dq.transpose(1, 2).contiguous().transpose(1, 2), dk.mT.contiguous().mT)):
            apart = torch.full_like(in_place, torch.nan)
            again = prepare_heads_backward(one, other, packed, apart, *self.given)
            for i in range(2):
                assert torch.equal(self.split(apart)[i], self.split(in_place)[i])
            assert self.split(apart)[2].isnan().all()
            if self.norms:
                assert torch.equal(again, sums)


def assert_bf16(got, exact, rounding):
    assert got.dtype == torch.bfloat16
    off = (got.double() - exact).abs() - rounding * exact.abs()
    assert off.max() <= NOISE * exact.abs().max(), off.argmax()
