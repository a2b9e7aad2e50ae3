"""Delayed scaling: every FP8 tensor of a model is cast with a scale taken from its largest magnitudes of past steps.

One row of tensors holds the whole model's state, so that a step's update is a handful of launches. Scales change once
an optimizer step, at its first forward, and are the same in all its micro-batches, and on all ranks: those have agreed
about the magnitudes at the end of the step before (`precision.state.agree`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gpt2_fp8.kernels.slot import LARGEST, Slot

Direction = Literal["forward", "gradient"]
TENSORS = ("scale", "scale_inv", "history", "largest")

# Scales stay within its inverse and it: products multiply two inverses, and 2^-120 is a normal float32 still, which
# kernels that flush subnormal numbers read as it is.
LARGEST_SCALE = 2.0**60


class Place(NamedTuple):
    """Which of a model's FP8 tensors: the forward's and the gradients' are counted apart."""

    direction: Direction
    number: int


@dataclass(frozen=True)
class DelayedScaling:
    """scale = largest of the format / (largest magnitude of the last `history` steps) / 2^margin. And whether the
    blocks' products that give input gradients sum in the tensor cores alone, to some 14 bits."""

    history: int
    margin: int
    most_recent: bool  # take the last step's magnitude alone
    forward: torch.dtype  # of activations and weights
    gradient: torch.dtype
    fast_accumulation: bool = False


class Scales(nn.Module):
    """The scales of a model. Layers `reserve` their tensors while they are built; `allocate` ends that.

    Its tensors are no buffers: data parallelism would write rank 0's magnitudes over the others' before each step. They
    are not in the state dict either: `precision.state` saves them through `fp8_meta`, as it does Transformer Engine's.
    """

    scale: Tensor  # float32 [tensors]
    scale_inv: Tensor  # float32 [tensors, 4], the first counts: cuBLASLt reads scales at multiples of 16 bytes
    history: Tensor  # float32 [steps, tensors]; row 0 is the step under way
    largest: Tensor  # float32 [tensors]

    def __init__(self, settings: DelayedScaling):
        super().__init__()
        self.settings = settings
        self._counts: dict[Direction, int] = {"forward": 0, "gradient": 0}
        self._slots: dict[Place, Slot] = {}

    def reserve(self, direction: Direction) -> Place:
        """A place for one more FP8 tensor."""
        self._counts[direction] += 1
        return Place(direction, self._counts[direction] - 1)

    def allocate(self, device: torch.device) -> None:
        """Make the tensors: every scale 1, no magnitude seen."""
        largest = [
            LARGEST[getattr(self.settings, direction)]
            for direction, count in self._counts.items()
            for _ in range(count)
        ]
        n = len(largest)
        values = {
            "scale": torch.ones(n, device=device),
            "scale_inv": torch.ones(n, 4, device=device),
            "history": torch.zeros(self.settings.history, n, device=device),
            "largest": torch.tensor(largest, device=device),
        }
        vars(self).update(values)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._slots = {}  # they are views of tensors that may now be elsewhere
        for name in TENSORS:
            if name in vars(self):
                value = vars(self)[name]
                vars(self)[name] = value.to(fn(value).device)
        return super()._apply(fn, recurse)

    def slot(self, place: Place) -> Slot:
        """Views of one tensor's scale and of where its magnitude goes."""
        if place not in self._slots:
            start = self._columns(place.direction).start + place.number
            one = slice(start, start + 1)
            dtype = getattr(self.settings, place.direction)
            self._slots[place] = Slot(self.scale[one], self.scale_inv[start, :1], self.history[0, one], dtype)
        return self._slots[place]

    def _columns(self, direction: Direction) -> slice:
        forward, gradient = self._counts.values()
        return slice(0, forward) if direction == "forward" else slice(forward, forward + gradient)

    def begin(self, is_first_microbatch: bool | None) -> None:
        """Before a forward. In training, a step's first one turns the magnitudes of the steps before into scales."""
        if not (self.training and torch.is_grad_enabled()):
            self.scale_inv.copy_((1 / self.scale)[:, None])  # they may just have come from a checkpoint
        elif is_first_microbatch is not False:
            self.update()
            self.history.copy_(self.history.roll(1, 0))
            self.history[0].zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Turn the magnitudes seen so far into scales. One that is not finite counts for nothing; a tensor of which no
        other was seen keeps its scale. For magnitudes that have jumped see `precision.magnitudes`."""
        self.history.nan_to_num_(nan=0.0, posinf=0.0)
        amax = self.history[0] if self.settings.most_recent else self.history.amax(0)
        fresh = self.largest / amax * 2.0**-self.settings.margin
        within = fresh.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
        self.scale.copy_(torch.where(torch.isfinite(fresh), within, self.scale))
        self.scale_inv.copy_((1 / self.scale)[:, None])

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The state as Transformer Engine's layers name theirs: by direction, `scale` [n] and `amax_history`."""
        columns = {"scaling_fwd": self._columns("forward"), "scaling_bwd": self._columns("gradient")}
        return {
            name: SimpleNamespace(scale=self.scale[part], amax_history=self.history[:, part])
            for name, part in columns.items()
        }
