"""The gradients of a model that FSDP divides among ranks. Plain torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gpt2_fp8.compat.fully_shard import count_collectives, reset_iteration
from gpt2_fp8.engine.exchange import Exchange


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
