"""What Muon does to a matrix beside matrix products, in two kernels: each number is read once and written once.

The same arithmetic in plain torch is `torch.optim.Muon`'s. A skipped update writes neither momentum nor weights. One
launch serves any number of matrices of one shape, whose addresses it reads: a model has hundreds of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # elements of a program
_ALIGNMENT = 16  # bytes of an address, so that a thread moves four numbers at once


@triton.jit
def _start(addresses, of):
    """Return where the gradient (0), the momentum (1) or the weights (2) of this program's matrix begin."""
    address = tl.load(addresses + tl.program_id(1) * 3 + of)
    return tl.multiple_of(address, 16).to(tl.pointer_type(tl.float32))


@triton.jit
def _momentum(addresses, updates, skip, count, rest, SIZE: tl.constexpr):
    gradients, buffers = _start(addresses, 0), _start(addresses, 1)
    updates += tl.program_id(1).to(tl.int64) * count
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    g = tl.load(gradients + index, mask=inside, other=0.0)
    before = tl.load(buffers + index, mask=inside, other=0.0)
    after = before + rest * (g - before)
    tl.store(updates + index, (after - (after - g) * rest).to(tl.bfloat16), mask=inside)
    if tl.load(skip) == 0:
        tl.store(buffers + index, after, mask=inside)


@triton.jit
def _apply(addresses, updates, skip, count, decay, rate, SIZE: tl.constexpr):
    if tl.load(skip) != 0:
        return
    weights = _start(addresses, 2)
    updates += tl.program_id(1).to(tl.int64) * count
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    w = tl.load(weights + index, mask=inside, other=0.0) * decay
    u = tl.load(updates + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(weights + index, w - rate * u, mask=inside)


def takes(*tensors: Tensor) -> bool:
    """Return whether the kernels can read and write these tensors in place."""
    return all(t.is_cuda and t.is_contiguous() and t.data_ptr() % _ALIGNMENT == 0 for t in tensors)


def put_addresses(matrices: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Put the addresses of gradient, momentum and weights of each matrix on their device. The host does not wait.

    The tensors are float32 of one shape, and `takes` takes them. Whoever has the addresses keeps the tensors alive.
    """
    addresses = torch.tensor([[tensor.data_ptr() for tensor in of] for of in matrices])
    return addresses.pin_memory().to(matrices[0][0].device, non_blocking=True)


def accumulate(addresses: Tensor, updates: Tensor, skip: Tensor, momentum: float) -> None:
    """Move each matrix's momentum towards its gradient, unless `skip` is not 0; put Nesterov's into `updates`.

    addresses: `put_addresses`. updates: contiguous, bfloat16 [number, rows, columns]. skip: float32, one element.
    """
    count = updates[0].numel()
    with torch.cuda.device_of(updates):
        _momentum[triton.cdiv(count, SIZE), len(updates)](addresses, updates, skip, count, 1 - momentum, SIZE=SIZE)


def apply(addresses: Tensor, updates: Tensor, skip: Tensor, decay: float, rate: float) -> None:
    """Replace each matrix by `decay` times it less `rate` times its update, unless `skip` is not 0.

    addresses, updates, skip: as in `accumulate`.
    """
    count = updates[0].numel()
    with torch.cuda.device_of(updates):
        _apply[triton.cdiv(count, SIZE), len(updates)](addresses, updates, skip, count, decay, rate, SIZE=SIZE)
