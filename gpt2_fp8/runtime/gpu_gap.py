"""How long a GPU has nothing to do between two steps, by CUDA events that nothing waits for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Gap(NamedTuple):
    """The time between two moments in a GPU's work."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    def seconds(self) -> float:
        """Return how long it was. Both moments must be over."""
        return self.begin.elapsed_time(self.end) / 1000


class GapClock:
    """Marks where the work of a step begins and ends on the GPU, in the current stream. On a CPU there are no gaps."""

    def __init__(self) -> None:
        self._ended: torch.cuda.Event | None = None

    def step_begins(self) -> Gap | None:
        """Return the gap before a step whose work is launched next; None before the first."""
        return None if self._ended is None else Gap(self._ended, _now())

    def step_ended(self, ids: Tensor) -> None:
        """Mark the end of what was launched for a step. `ids`: on its device."""
        self._ended = _now() if ids.is_cuda else None


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
