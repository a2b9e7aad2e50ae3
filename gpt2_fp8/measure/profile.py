"""Where a step's time goes: its kernels by name, from torch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from gpt2_fp8.measure.case import Kernel

NAME_CHARACTERS = 90
# Parts of names that tell where a kernel is from and not what it does.
_NOISE = re.compile(
    r"^void |\(anonymous namespace\)::|<unnamed>::|\bat::native::|\bat::cuda::|\bstd::|\btransformer_engine::"
)


def of_step(step: Callable[[], object], device: str) -> list[Kernel]:
    """Profile one more step: its kernels, the longest first; on a CPU operators, without the time of their children."""
    on_gpu = device == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    microseconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    for event in profiler.events() or []:
        if event.device_type == kind and not getattr(event, "is_user_annotation", False):
            name = short(event.name)
            microseconds[name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            calls[name] += 1
    whole = sum(microseconds.values()) or 1.0
    names = sorted(microseconds, key=microseconds.__getitem__, reverse=True)
    return [
        Kernel(name=name, milliseconds=microseconds[name] / 1e3, share=microseconds[name] / whole, calls=calls[name])
        for name in names
    ]


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
