"""What Muon does to a matrix beside matrix products, in two kernels: each number is read once and written once.

The same arithmetic in plain torch is `torch.optim.Muon`'s. A skipped update writes neither momentum nor weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # elements of a program


@triton.jit
def _momentum(gradients, buffers, updates, skip, count, rest, SIZE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    g = tl.load(gradients + index, mask=inside, other=0.0)
    before = tl.load(buffers + index, mask=inside, other=0.0)
    after = before + rest * (g - before)
    tl.store(updates + index, (after - (after - g) * rest).to(tl.bfloat16), mask=inside)
    if tl.load(skip) == 0:
        tl.store(buffers + index, after, mask=inside)


@triton.jit
def _apply(weights, updates, skip, count, decay, rate, SIZE: tl.constexpr):
    if tl.load(skip) != 0:
        return
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    w = tl.load(weights + index, mask=inside, other=0.0) * decay
    u = tl.load(updates + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(weights + index, w - rate * u, mask=inside)


def accumulate(gradient: Tensor, buffer: Tensor, update: Tensor, skip: Tensor, momentum: float) -> None:
    """Move the momentum `buffer` towards `gradient`, unless `skip` is not 0; put Nesterov's momentum into `update`.

    gradient, buffer, update: contiguous, of one shape; float32, float32 and bfloat16. skip: float32, one element.
    """
    count = buffer.numel()
    with _on(buffer):
        _momentum[(triton.cdiv(count, SIZE),)](gradient, buffer, update, skip, count, 1 - momentum, SIZE=SIZE)


def apply(weights: Tensor, update: Tensor, skip: Tensor, decay: float, rate: float) -> None:
    """Replace `weights` by `decay` times them less `rate` times `update`, unless `skip` is not 0.

    weights, update: contiguous, of one shape; float32 and bfloat16. skip: float32, one element.
    """
    count = weights.numel()
    with _on(weights):
        _apply[(triton.cdiv(count, SIZE),)](weights, update, skip, count, decay, rate, SIZE=SIZE)


def _on(tensor: Tensor) -> AbstractContextManager:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
