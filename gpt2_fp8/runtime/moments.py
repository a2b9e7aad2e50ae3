"""Moments in a run's work and the time between them, and values on their way to the host: CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Moment:
    """Now: on a GPU behind all that was launched in its current stream, on a CPU by the host's clock."""

    def __init__(self, device: torch.device):
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def wait(self) -> None:
        """Wait until it is over."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, before: Moment) -> float:
        """Return the seconds from `before`, of the same device, to this moment. Both must be over."""
        if self._event is None or before._event is None:
            return self._seconds - before._seconds
        return float(before._event.elapsed_time(self._event)) / 1000


def seconds_of_each(calls: Iterable[Callable[[], object]], device: torch.device) -> list[float]:
    """Measure each of several calls in a row, in seconds. Nothing waits for the GPU but the last moment."""
    marks = [Moment(device)]
    for call in calls:
        call()
        marks.append(Moment(device))
    marks[-1].wait()
    return [after.seconds_since(before) for before, after in pairwise(marks)]


class Gap(NamedTuple):
    """The time between the work of two steps, in which a GPU has nothing to do."""

    begin: Moment
    end: Moment

    def seconds(self) -> float:
        """Return how long it was. Both moments must be over."""
        return self.end.seconds_since(self.begin)


class GapClock:
    """Notes where the work of steps begins and ends."""

    def __init__(self) -> None:
        self._ended: Moment | None = None

    def step_begins(self, device: torch.device) -> Gap | None:
        """Return the gap before a step whose work is launched next; None before the first."""
        return None if self._ended is None else Gap(self._ended, Moment(device))

    def step_ended(self, device: torch.device) -> None:
        """Note the end of what was launched for a step."""
        self._ended = Moment(device)


class Sent:
    """A copy of a tensor's values that travels to the host. To read it waits for what was launched before it alone.

    Make it on the tensor's stream. `arrival`: the moment at which the values are there; over once they are read.
    """

    def __init__(self, values: Tensor):
        self._values: Tensor | None = values
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        self.arrival = Moment(values.device)
        self._read: Any = None

    def read(self) -> Any:
        """Wait for the values and return them, as `Tensor.tolist` does."""
        if self._values is not None:
            self.arrival.wait()
            self._read, self._values = self._values.tolist(), None  # pinned memory is free for the next one
        return self._read
