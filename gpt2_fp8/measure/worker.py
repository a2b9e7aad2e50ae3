"""The child of `measure`: trains a case for its steps, as the LightningModule does but without a Trainer around it.

It is `python -m gpt2_fp8.measure.worker RESULT < CASE`; both are JSON, RESULT is a path.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.config import parsing
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import DelayedRecipe, RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.engine.engine import Engine
from gpt2_fp8.engine.optim import build_optimizer, build_schedule
from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.engine.step import StepResult, update
from gpt2_fp8.measure import memory_bound, profile
from gpt2_fp8.measure.case import Case, Result
from gpt2_fp8.measure.subprocesses import one_line
from gpt2_fp8.measure.versions import versions
from gpt2_fp8.model.flops import flops_per_token, peak_bf16_flops
from gpt2_fp8.model.gpt2 import initialise, padded_vocabulary
from gpt2_fp8.precision.plugin import build_plugin
from gpt2_fp8.precision.resolve import Plan, resolve
from gpt2_fp8.runtime import devices, registry


class Training:
    """What a run has without Lightning: model, optimizer, schedule, precision, and the step over them."""

    def __init__(self, config: RunConfig, plan: Plan, vocab_size: int):
        torch.manual_seed(config.seed)
        with torch.device(plan.device):
            self.engine = Engine(config, plan, vocab_size)
        initialise(self.engine.model, config.seed)
        self.max_grad_norm = config.optim.max_grad_norm
        self.context = build_plugin(config, plan).forward_context
        self.optimizer = build_optimizer(self.engine.model, config.optim)
        self.schedule = build_schedule(self.optimizer, config.optim, config.trainer.max_steps)
        self.needs_scales = plan.fp8 and isinstance(config.recipe, DelayedRecipe)
        self.last: StepResult | None = None

    def step(self, ids: Tensor) -> StepResult:
        """One optimizer step on int32 [global_batch_size, n_positions + 1]; calibrates before the first."""
        if self.needs_scales:
            self.engine.calibrate(ids, self.context)
            self.needs_scales = False
        if self.last is not None:
            self.last.read()  # as a run does, before the next step
        moments = self.engine.like_moments() if self.last is None else []
        loss = self.engine.gradients(ids, self.context, Tensor.backward)
        del moments
        parameters = self.engine.model.parameters()
        absurd = self.engine.absurd_magnitudes()
        self.last = update(self.optimizer, self.optimizer.step, parameters, loss, self.max_grad_norm, absurd)
        self.schedule.step()
        return self.last


def run(case: Case) -> Result:
    """Measure a case in this process."""
    known: dict[str, Any] = {"versions": versions()}
    try:
        _measure(case, known)
    except UserError as error:
        message, remedy = map("; ".join, zip(*error.problems, strict=True))
        return Result(status="refused", message=message, remedy=remedy, **known)
    except Exception as error:
        traceback.print_exc()
        if is_out_of_memory(error):
            return Result(status="out of memory", message=_wanted(error), **known)
        return Result(status="failed", message=one_line(f"{type(error).__name__}: {error}"), **known)
    return Result(status="ok", **known)


def _measure(case: Case, known: dict[str, Any]) -> None:
    """Put into `known` what a Result holds, as soon as it is known."""
    config = case.config
    registry.load(config.plugins, Path.cwd())
    if config.trainer.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    device = devices.device(config)
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    plan = resolve(config, device)
    known.update(device=name, ran=plan.ran, reason=plan.reason, backend=plan.backend, compiled=plan.compile)
    batches, vocab_size = _batches(config, case.warmup + case.steps + case.profile, device)
    training = Training(config, plan, vocab_size)
    results = [training.step(ids) for ids in batches[: case.warmup]]
    if device == "cuda":
        torch.cuda.synchronize()
        if not plan.graphs:  # what a graph uses was allocated when it was recorded
            torch.cuda.reset_peak_memory_stats()
    timed, seconds = _timed(training.step, batches[case.warmup : case.warmup + case.steps], device)
    tokens = config.global_batch_size * config.model.n_positions
    rates = [tokens / s for s in seconds]
    median = statistics.median(rates)
    known.update(tokens_per_second=median, slowest=min(rates), fastest=max(rates))
    if device == "cuda":
        known["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    if peak := peak_bf16_flops(name):
        known["mfu_bf16"] = median * flops_per_token(config.model, padded_vocabulary(vocab_size)) / peak
    known["losses"] = [result.loss.item() for result in results + timed]
    known["grad_norms"] = [result.grad_norm.item() for result in results + timed]
    if case.profile:
        known["profile"] = profile.of_step(lambda: training.step(batches[-1]), device)


def _batches(config: RunConfig, count: int, device: str) -> tuple[list[Tensor], int]:
    """The first `count` steps' ids, int32 [global_batch_size, n_positions + 1] on the device, and the vocabulary's
    size. A run of fewer steps goes round."""
    data = TokenDataModule.from_config(replace(config, data=replace(config.data, val_sequences=0)))
    data.setup()
    try:
        items = itertools.islice(data.train_dataloader(), count)
        found = [item["ids"].to(device) for item in items]
        vocab_size = config.model.vocab_size or data.vocab_size
    finally:
        data.teardown()
    return [found[i % len(found)] for i in range(count)], vocab_size


def _timed(
    step: Callable[[Tensor], StepResult], batches: list[Tensor], device: str
) -> tuple[list[StepResult], list[float]]:
    """The results of steps, and the seconds that each took. On a GPU the time is the GPU's own, between marks in its
    queue; the host waits for a step's verdict, as in a run, and at the end."""
    results = []
    if device == "cpu":
        clock = [time.perf_counter()]
        for ids in batches:
            results.append(step(ids))
            clock.append(time.perf_counter())
        return results, [after - before for before, after in itertools.pairwise(clock)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    marks[0].record()
    for ids, mark in zip(batches, marks[1:], strict=True):
        results.append(step(ids))
        mark.record()
    torch.cuda.synchronize()
    return results, [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _wanted(error: Exception) -> str:
    """How much memory was asked for, in one line."""
    text = memory_bound.wanted(error)
    if not (isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized()):
        return text
    used, whole = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    return f"{text}, with {used / 2**30:.1f} of {whole / 2**30:.1f} GiB in use"


if __name__ == "__main__":
    _case, _found = parsing.build(Case, json.load(sys.stdin))
    assert _case is not None, _found
    Path(sys.argv[1]).write_text(json.dumps(asdict(run(_case))))
