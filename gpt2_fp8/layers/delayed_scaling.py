"""Delayed scaling: every FP8 tensor of a model is quantized with a scale taken from its amaxes of past steps.

One row of tensors holds the whole model's state, so that a step's update takes only a few kernel launches. Scales
change once an optimizer step, at its first forward. They are the same in all its micro-batches and on all ranks: the
ranks agreed about the amaxes at the end of the step before (`FP8Scaling.agree`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gpt2_fp8.kernels.formats import LARGEST, Slot

Direction = Literal["forward", "gradient"]

# Scales stay between 1 / LARGEST_SCALE and LARGEST_SCALE. GEMMs multiply two inverse scales, and 2^-120 is still a
# normal float32: kernels that flush subnormal numbers to 0 read it correctly.
LARGEST_SCALE = 2.0**60


class Place(NamedTuple):
    """The index of one FP8 tensor of a model. Forward tensors and gradients are counted separately."""

    direction: Direction
    number: int


@dataclass(frozen=True)
class DelayedScaling:
    """The settings: scale = format's largest number / (amax of the last `history` steps) / 2^margin.

    `fast_accumulation`: the GEMMs for the blocks' input gradients sum only in the tensor cores, to about 14 bits.
    """

    history: int
    margin: int
    most_recent: bool  # use only the last step's amax
    forward: torch.dtype  # of activations and weights
    gradient: torch.dtype
    fast_accumulation: bool = False


class Scales(nn.Module):
    """The scales of a model. Layers `reserve` their tensors while they are built; then `allocate` creates them.

    The tensors are not registered as buffers: data parallelism would overwrite the other ranks' amaxes with rank 0's
    before each step. They are not in the state dict either: `fp8.state` saves them.
    """

    scale: Tensor  # float32 [tensors]
    scale_inv: Tensor  # float32 [tensors, 4]; only column 0 is used: cuBLASLt needs scales at multiples of 16 bytes
    history: Tensor  # float32 [steps, tensors]; row 0 belongs to the current step
    largest: Tensor  # float32 [tensors]

    def __init__(self, settings: DelayedScaling):
        super().__init__()
        self.settings = settings
        self._counts: dict[Direction, int] = {"forward": 0, "gradient": 0}
        self._slots: dict[Place, Slot] = {}

    def reserve(self, direction: Direction) -> Place:
        """Return the place of one more FP8 tensor."""
        self._counts[direction] += 1
        return Place(direction, self._counts[direction] - 1)

    def allocate(self, device: torch.device) -> None:
        """Create the tensors: every scale is 1, every amax 0."""
        largest = [LARGEST[getattr(self.settings, way)] for way, count in self._counts.items() for _ in range(count)]
        self.scale = torch.ones(len(largest), device=device)
        self.scale_inv = torch.ones(len(largest), 4, device=device)
        self.history = torch.zeros(self.settings.history, len(largest), device=device)
        self.largest = torch.tensor(largest, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._slots = {}  # slots are views of tensors that may now be on another device
        for name in ("scale", "scale_inv", "history", "largest"):
            if name in vars(self):
                value = getattr(self, name)
                setattr(self, name, value.to(fn(value).device))
        return super()._apply(fn, recurse)

    def slot(self, place: Place) -> Slot:
        """Return views of one tensor's scale and of where its amax is recorded."""
        if place not in self._slots:
            start = self.column(place)
            one = slice(start, start + 1)
            dtype = getattr(self.settings, place.direction)
            self._slots[place] = Slot(self.scale[one], self.scale_inv[start, :1], self.history[0, one], dtype)
        return self._slots[place]

    def column(self, place: Place) -> int:
        """Return the index of one FP8 tensor among all, once every layer is built."""
        return self._columns(place.direction).start + place.number

    def _columns(self, direction: Direction) -> slice:
        forward, gradient = self._counts.values()
        return slice(0, forward) if direction == "forward" else slice(forward, forward + gradient)

    def begin(self, is_first_microbatch: bool | None) -> None:
        """Prepare for a forward. In training, a step's first one turns the amaxes of past steps into scales."""
        if not (self.training and torch.is_grad_enabled()):
            self.scale_inv.copy_((1 / self.scale)[:, None])  # the scales may just have come from a checkpoint
        elif is_first_microbatch is not False:
            self.update()
            self.history.copy_(self.history.roll(1, 0))
            self.history[0].zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Turn the amaxes seen so far into scales.

        An amax that is not finite is ignored. A tensor without any other amax keeps its scale. For amaxes that have
        jumped see `FP8Scaling.limit`.
        """
        self.history.nan_to_num_(nan=0.0, posinf=0.0)
        amax = self.history[0] if self.settings.most_recent else self.history.amax(0)
        fresh = self.largest / amax * 2.0**-self.settings.margin
        within = fresh.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
        self.scale.copy_(torch.where(torch.isfinite(fresh), within, self.scale))
        self.scale_inv.copy_((1 / self.scale)[:, None])

    def views(self) -> dict[Direction, tuple[Tensor, Tensor]]:
        """Return views of the scales [n] and of the history [steps, n], by direction; {} before `allocate`."""
        if "scale" not in vars(self):
            return {}
        columns = {direction: self._columns(direction) for direction in self._counts}
        return {direction: (self.scale[part], self.history[:, part]) for direction, part in columns.items()}
