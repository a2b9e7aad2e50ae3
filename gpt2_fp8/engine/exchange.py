"""What the ranks of a run exchange of a step's gradients. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gpt2_fp8.compat.fully_shard import count_collectives, reset_iteration
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

    Attributes:
        place: see `out_of_memory.Fitting`.
    """

    place: Callable[[], object] | None = None

    def __init__(self, parameters: Iterable[Tensor], no_sync: NoSync = nullcontext):
        self.parameters = list(parameters)
        self.no_sync = no_sync

    def part(self, last: bool) -> AbstractContextManager:
        """Enter one micro-batch of a step, its forward and its backward."""
        return nullcontext()

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


class Sharded(Exchange):
    """The gradients of a model that FSDP divides. Its backward reduces them, unit by unit, and a rank has its rows.

    They are reduced in each micro-batch: otherwise a rank would keep the gradients of the whole model between two of
    them, in float32. Copies of the model average theirs in the last one.

    Args:
        model: the root.
        mesh: of its ranks.
    """

    def __init__(self, model: Any, mesh: DeviceMesh):
        super().__init__(model.parameters())
        self._model = model
        # Ranks that stop after another number of collectives would meet in different ones. gloo does not count them.
        self.place = partial(count_collectives, mesh)

    def part(self, last: bool) -> AbstractContextManager:
        """See `Exchange`."""
        self._model.set_requires_all_reduce(last)
        return nullcontext()

    def end(self) -> None:
        """Do nothing: the last backward has reduced every gradient."""

    def give_up(self) -> None:
        """See `Exchange`. Some gradients may be in gathered parameters, others in the rows."""
        self._model.zero_grad(set_to_none=True)
        reset_iteration(self._model)
        self._model.zero_grad(set_to_none=True)

    def clip(self, max_norm: float) -> Tensor:
        """See `Exchange`. Collective."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm, foreach=True)
        return norm
