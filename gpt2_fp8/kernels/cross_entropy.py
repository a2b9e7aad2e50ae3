"""Softmax cross-entropy that turns the logits into their own gradient, in one kernel.

A row of GPT-2's logits is 100 kB in bf16. One program reads it from memory once for the maximum and the sum, again from
L2 for the probabilities, and writes the gradient over it: two passes over memory in all, where a forward and a backward
kernel need three and a separate buffer needs four. What the caller gives up: the logits are gone afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
WARPS = 16
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(
    logits, targets, losses, weight, stride, vocab_size, columns,
    WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)
    if target < 0:
        tl.store(losses + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, columns, BLOCK):
                tl.store(logits + start + offsets, 0.0, mask=start + offsets < columns)
        return
    # Maximum and sum, in powers of two; every lane keeps its own until the end, so that warps meet only twice.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + offsets < vocab_size
        x = tl.load(logits + start + offsets, mask=inside, other=-float("inf")).to(tl.float32) * LOG2E
        larger = tl.maximum(largest, x)
        total = total * tl.exp2(largest - larger) + tl.exp2(x - larger)
        largest = larger
    maximum = tl.max(largest, axis=0)
    normaliser = tl.log2(tl.sum(total * tl.exp2(largest - maximum), axis=0)) + maximum
    picked = tl.load(logits + target).to(tl.float32)
    tl.store(losses + row, normaliser / LOG2E - picked)
    if WITH_GRADIENT:
        scale = tl.load(weight)
        tl.debug_barrier()  # `picked` is read by every warp before any of them writes over it
        for start in range(0, columns, BLOCK):
            inside = start + offsets < vocab_size
            x = tl.load(logits + start + offsets, mask=inside, other=-float("inf")).to(tl.float32) * LOG2E
            gradient = tl.exp2(x - normaliser) - tl.where(start + offsets == target, 1.0, 0.0)
            tl.store(logits + start + offsets, gradient * scale, mask=start + offsets < columns)


@triton.jit
def _scale(values, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by == 1.0:
        return
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < count
        tl.store(values + offsets, tl.load(values + offsets, mask=inside).to(tl.float32) * by, mask=inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        rows, columns = logits.shape
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        weight = (targets >= 0).sum().clamp_min(1).to(torch.float32).reciprocal()
        with_gradient = ctx.needs_input_grad[0]
        _rows[(rows,)](
            logits, targets, losses, weight, logits.stride(0), vocab_size, columns,
            WITH_GRADIENT=with_gradient, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        if with_gradient:
            ctx.save_for_backward(logits.detach())
        return losses.sum() * weight

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        count = gradient.numel()
        # The common factor 1 costs a launch and no traffic; the host never learns which it was.
        _scale[(min(triton.cdiv(count, 4096), 2048),)](gradient, upstream[0].float(), count, BLOCK=4096)
        return gradient, None, None


def fused_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean cross-entropy over the rows whose target is not negative.

    logits: [rows, columns] bf16 or float32 on CUDA, contiguous; **overwritten** with their gradient when they require
    one. targets: int64 [rows]; negative: the row counts for nothing. Columns from `vocab_size` on are padding: they
    take no part and get a gradient of 0. Returns a float32 scalar (0 where every row is ignored); one backward only.
    """
    assert logits.is_contiguous(), "the gradient is written where the logits are"
    assert logits.dim() == 2, logits.shape
    assert targets.shape == logits.shape[:1], (logits.shape, targets.shape)
    return _CrossEntropy.apply(logits, targets, vocab_size)
