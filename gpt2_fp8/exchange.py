"""What the processes of a run tell each other once a step. Plain torch; nothing where there is only one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed


def several() -> bool:
    """Whether this process is one of several that train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank, told to all of them."""
    if not several():
        return flag
    agreed = torch.tensor(float(flag), device=device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX)
    return bool(agreed.item())


def average(parameters: Iterable[Tensor]) -> None:
    """Replace every parameter's gradient by its mean over the ranks. To be called on all of them at once.

    After the backward and not within it, as DistributedDataParallel would: a rank whose backward fails (out of memory)
    can then begin again without leaving the others in the midst of an exchange, and the gradients need not go through
    autograd. What that costs is the overlap with the last micro-batch's backward.
    """
    if not several():
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    works = [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]
    for work in works:
        work.wait()
    torch._foreach_div_(gradients, distributed.get_world_size())
