"""What the ranks of a run exchange of a step's gradients. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, distributed

from gpt2_fp8.compat.torch_private import all_reduce_together, divide_all
from gpt2_fp8.runtime import collectives

NoSync = Callable[[], AbstractContextManager]


class Exchange:
    """Owns the gradients of a step, in the parameters' `.grad`, from the first micro-batch to their norm.

    Ranks exchange gradients after the last backward, not within it as DistributedDataParallel does. A rank whose
    backward fails (out of memory) can then begin again without leaving the others in the middle of a collective. And
    gradients need not go through autograd. The price is that communication does not overlap with that backward.

    Args:
        parameters: the model's.
        no_sync: the context in which a wrapper of the model leaves its gradients alone, as Lightning's DDP does.
    """

    def __init__(self, parameters: Iterable[Tensor], no_sync: NoSync = nullcontext):
        self.parameters = list(parameters)
        self.no_sync = no_sync

    def end(self) -> None:
        """Replace every gradient by its mean over the ranks, all of which have theirs. Collective.

        NCCL reduces and divides them all in one launch. gloo has no mean, and no need of one.
        """
        if not collectives.is_distributed():
            return
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if distributed.get_backend() == "nccl":
            all_reduce_together(gradients, distributed.ReduceOp.AVG)
            return
        works = [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()
        divide_all(gradients, distributed.get_world_size())

    def give_up(self) -> None:
        """Free the gradients of a step that failed, or whose update is not made."""
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`. Returns the norm before, float32."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm, foreach=True)
