"""Where a step's time goes: its kernels by name, and what a GPU waits between them, from torch's profiler."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from gpt2_fp8.compat import torch_private
from gpt2_fp8.measure.case import WAITS, Kernel

NAME_CHARACTERS = 90
# Parts of names that tell where a kernel is from and not what it does.
_NOISE = re.compile(
    r"^void |\(anonymous namespace\)::|<unnamed>::|\bat::native::|\bat::cuda::|\bstd::|\btransformer_engine::"
)


def of_step(step: Callable[[], object], device: str) -> list[Kernel]:
    """Profile one more step: its kernels, the longest first; on a CPU operators, without the time of their children.

    On a GPU a step before it lets the host get ahead, as in a run. One line is the time in which no kernel ran, from
    the step's first one to its last; its calls are how often. All lines together are the step, unless kernels overlap.
    The list is empty where the driver lets nobody see kernels.
    """
    if device == "cpu":
        return _lines((short(e.name), e.self_cpu_time_total) for e in _events(step, ProfilerActivity.CPU))

    def twice() -> None:
        step()
        torch_private.mark_on_gpu()
        step()

    torch_private.mark_on_gpu()  # it is loaded at its first use
    torch.cuda.synchronize()
    events = _events(twice, ProfilerActivity.CUDA)
    begin = next((event.time_range.end for event in events if torch_private.MARK in event.name), math.inf)
    own = [event for event in events if event.time_range.start >= begin]
    kernels = [(short(event.name), event.time_range.elapsed_us()) for event in own]
    gaps = waits((event.time_range.start, event.time_range.end) for event in own)
    return _lines([*kernels, *((WAITS, gap) for gap in gaps)])


def _events(function: Callable[[], object], activity: ProfilerActivity) -> list[FunctionEvent]:
    kind = DeviceType.CPU if activity == ProfilerActivity.CPU else DeviceType.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        function()
        if kind == DeviceType.CUDA:
            torch.cuda.synchronize()
    return [e for e in profiler.events() or [] if e.device_type == kind and not getattr(e, "is_user_annotation", False)]


def _lines(parts: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Sum (name, microseconds) by name; the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in parts:
        times[name].append(microseconds)
    sums = {name: sum(each) for name, each in times.items()}
    whole = sum(sums.values()) or 1.0
    return [
        Kernel(name=name, milliseconds=sums[name] / 1e3, share=sums[name] / whole, calls=len(times[name]))
        for name in sorted(sums, key=sums.__getitem__, reverse=True)
    ]


def waits(ranges: Iterable[tuple[float, float]]) -> list[float]:
    """Return the gaps between (begin, end) ranges in which none of them is, in their unit and order."""
    ordered = sorted(ranges)
    reached = accumulate((end for _, end in ordered), max)
    return [begin - end for end, (begin, _) in zip(reached, ordered[1:], strict=False) if begin > end]


def short(name: str) -> str:
    """Shorten a kernel's name: without arguments and namespaces, and without its middle if it is long."""
    name = _NOISE.sub("", _without_arguments(name))
    return name if len(name) <= NAME_CHARACTERS else f"{name[: NAME_CHARACTERS - 33]}...{name[-30:]}"


def _without_arguments(name: str) -> str:
    """Cut arguments: `kernel<...>(int, float*)` to `kernel<...>`; `Memcpy DtoD (Device -> Device)` stays."""
    depth = 0
    for place in range(len(name) - 1, -1, -1) if name.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(name[place], 0)
        if depth == 0:
            return name[:place] if name[:place].strip() == name[:place] != "" else name
    return name
