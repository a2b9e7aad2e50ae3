"""Delayed scaling's state for the emulated layers, whose amaxes autograd brings out of the backward.

Plain torch cannot write amaxes where they belong inside a compiled backward. So each product takes zeros as an
additional input and returns its amaxes as their "gradient". One leaf holds the zeros of a whole model. When a backward
has filled its gradient, that raises the history's current row, and the gradient is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.layers.delayed_scaling import Place, Scales


class EmulatedScales(Scales):
    """The scales of a model of emulated layers. A backward records the amaxes of its forward too."""

    seen: Tensor  # float32 [tensors], zeros

    def allocate(self, device: torch.device) -> None:
        """See `Scales`."""
        super().allocate(device)
        self._listen()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if "history" in vars(self):
            self._listen()  # on the device where the history is now
        return self

    def _listen(self) -> None:
        row = self.history[0]

        @torch.no_grad()
        def record(seen: Tensor) -> None:
            assert seen.grad is not None
            row.copy_(torch.fmax(row, seen.grad))  # NaN is no amax
            seen.grad = None

        vars(self)["seen"] = torch.zeros_like(row).requires_grad_()
        self.seen.register_post_accumulate_grad_hook(record)

    def of(self, places: Iterable[Place]) -> tuple[Tensor, Tensor]:
        """Return some tensors' scales, and the zeros whose gradients are their amaxes."""
        columns = [self.column(place) for place in places]
        return torch.stack([self.scale[i] for i in columns]), torch.stack([self.seen[i] for i in columns])
