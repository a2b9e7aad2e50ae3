"""The child process of `measure`: trains a case's steps as the LightningModule does, but without a Trainer.

It is `python -m gpt2_fp8.measure.worker RESULT < CASE`; both are JSON, RESULT is a path.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from gpt2_fp8 import __version__
from gpt2_fp8.compat import torch_private
from gpt2_fp8.config import parsing
from gpt2_fp8.config.data_schema import without_validation
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import one_line
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.engine.step import StepResult
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8.resolve import Plan, resolve
from gpt2_fp8.kernels import library_versions
from gpt2_fp8.measure.case import WAITS, Case, Kernel, Result, Status
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import flops_per_token, peak_bf16_flops
from gpt2_fp8.runtime import devices, programs, registry
from gpt2_fp8.runtime.moments import seconds_of_each

# Parts of names that tell where a kernel is from and not what it does.
_NOISE = re.compile(
    r"^void |\(anonymous namespace\)::|<unnamed>::|\bat::native::|\bat::cuda::|\bstd::|\btransformer_engine::"
)


def versions() -> dict[str, str]:
    """Return the versions of the libraries, of CUDA and of the driver, by name; what is missing is left out."""
    found = {"gpt2_fp8": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if version := programs.installed_version("lightning"):
        found["lightning"] = version
    found |= library_versions()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        found["driver"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0]
    return found


def build(config: RunConfig, plan: Plan, vocab_size: int) -> TrainingStep:
    """Build what a run trains through, without Lightning."""
    torch.manual_seed(config.seed)
    with torch.device(plan.device):
        step = TrainingStep(config, plan, vocab_size)
    step.initialise()
    step.prepare_optimizer()
    return step


def run(case: Case) -> Result:
    """Measure a case in this process."""
    known: dict[str, Any] = {"versions": versions()}
    try:
        _measure(case, known)
    except UserError as error:
        message, remedy = ("; ".join(getattr(one, of) for one in error.problems) for of in ("cause", "remedy"))
        return Result(status="refused", message=message, remedy=remedy, **known)
    except Exception as error:
        traceback.print_exc()
        status: Status = "out of memory" if is_out_of_memory(error) else "failed"
        return Result(status=status, message=one_line(f"{type(error).__name__}: {error}"), **known)
    return Result(status="ok", **known)


def _measure(case: Case, known: dict[str, Any]) -> None:
    """Put the fields of a Result into `known`, each as soon as it is known."""
    config = case.config
    registry.load(config.plugins, Path.cwd())
    if config.trainer.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    device = devices.device(config)
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    plan = resolve(config, device)
    known.update(device=name, ran=plan.ran, reason=plan.reason, backend=plan.backend.name, layers=plan.label)
    known["compiled"] = plan.backend.compiled
    batches, vocab_size = _batches(config, case.warmup + case.steps + case.profile, device)
    known["attention"] = plan.backend.kernels(vocab_size)["attention"]
    step = build(config, plan, vocab_size)
    results: list[StepResult] = []
    step.on_settled.append(results.append)
    for ids in batches[: case.warmup]:
        step(ids)
    step.settle()
    if device == "cuda":
        torch.cuda.synchronize()
        if not (plan.backend.graphs or plan.recorded):  # a graph's memory was allocated when it was recorded
            torch.cuda.reset_peak_memory_stats()
    seconds = time_steps(step, batches[case.warmup : case.warmup + case.steps], device)
    tokens = tokens_a_step(config)
    rates = [tokens / s for s in seconds]
    median = statistics.median(rates)
    known.update(tokens_per_second=median, slowest=min(rates), fastest=max(rates))
    if device == "cuda":
        known["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    if peak := peak_bf16_flops(name):
        known["mfu_bf16"] = median * flops_per_token(config.model, padded_vocabulary(vocab_size)) / peak
    known["losses"] = [result.read().loss for result in results]
    known["grad_norms"] = [result.read().grad_norm for result in results]
    if case.profile:
        known["profile"] = profile_step(lambda: step(batches[-1]), device)


def _batches(config: RunConfig, count: int, device: str) -> tuple[list[Tensor], int]:
    """Return the ids of `count` steps on the device, int32 [sequences, n_positions + 1], and the vocabulary size."""
    data = TokenDataModule.from_config(replace(config, data=without_validation(config.data)))
    data.setup()
    try:
        items = itertools.islice(data.train_dataloader(), count)
        found = [item["ids"].to(device) for item in items]
        vocab_size = config.model.vocab_size or data.vocab_size
    finally:
        data.teardown()
    return [found[i % len(found)] for i in range(count)], vocab_size


def time_steps(step: TrainingStep, batches: list[Tensor], device: str) -> list[float]:
    """Return the seconds that each step took.

    On a GPU the time is the GPU's own, between events in its queue. The host settles each step as a run does: once
    the next one is launched, and at the end.
    """

    def one(ids: Tensor) -> None:
        step(ids)
        if device == "cpu":
            step.settle()

    found = seconds_of_each((partial(one, ids) for ids in batches), torch.device(device))
    step.settle()
    return found


# ---- where a step's time goes ----------------------------------------------------------------------------------------


def profile_step(step: Callable[[], object], device: str) -> list[Kernel]:
    """Profile one more step: its kernels, the longest first; on a CPU operators, without the time of their children.

    On a GPU a step before it lets the host get ahead, as in a run. One line is the time in which no kernel ran, from
    the step's first one to its last; its calls are how often. All lines together are the step, unless kernels overlap.
    The list is empty where the driver lets nobody see kernels.
    """
    if device == "cpu":
        return _lines((_NOISE.sub("", e.name), e.self_cpu_time_total) for e in _events(step, ProfilerActivity.CPU))

    def twice() -> None:
        step()
        torch_private.mark_on_gpu()
        step()

    torch_private.mark_on_gpu()  # it is loaded at its first use
    torch.cuda.synchronize()
    events = _events(twice, ProfilerActivity.CUDA)
    begin = next((event.time_range.end for event in events if torch_private.MARK in event.name), math.inf)
    own = [event for event in events if event.time_range.start >= begin]
    kernels = [(_NOISE.sub("", event.name), event.time_range.elapsed_us()) for event in own]
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
    reached = itertools.accumulate((end for _, end in ordered), max)
    return [begin - end for end, (begin, _) in zip(reached, ordered[1:], strict=False) if begin > end]


if __name__ == "__main__":
    _case, _found = parsing.build(Case, json.load(sys.stdin))
    assert _case is not None, _found
    Path(sys.argv[1]).write_text(json.dumps(asdict(run(_case))))
