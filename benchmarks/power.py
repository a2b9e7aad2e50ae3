"""Tokens a second of a bare loop, and what its GPU does: power, clock, temperature, and what limits the clock.

    python benchmarks/power.py --seconds 20 -- model=gpt2 data.tokenizer=gpt2 micro_batch_size=64 global_batch_size=128

The loop is a model, an optimizer and `for`, without Trainer, loader, log or checkpoints; tokens are random. Model, step
and clock are the benchmark's. The words after `--` are those of a run. `nvidia-smi` is read every 100 ms while steps
run, after a warm-up.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from words import Parser

from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.measure import worker
from gpt2_fp8.runtime import devices

FIELDS = "power.draw,clocks.sm,temperature.gpu,clocks_event_reasons.active"
REASONS = (  # NVML's, from bit 0 on
    "idle", "application clocks", "software power cap", "hardware slowdown", "sync boost", "software thermal slowdown",
    "hardware thermal slowdown", "hardware power brake", "display clocks",
)  # fmt: skip
CHUNK = 8  # steps between two looks at the time


class Sample(NamedTuple):
    """A reading."""

    watts: float
    megahertz: float  # of the multiprocessors
    celsius: float
    reasons: int  # bits of `REASONS`: what keeps the clock below its most


def rates_of(step: TrainingStep, steps: int) -> list[float]:
    """Train some steps, each on random ids of its own. Returns the tokens a second of each."""
    config, device = step.config, step.plan.device
    shape = (config.global_batch_size, config.model.n_positions + 1)
    ids = [torch.randint(vocabulary(config), shape, dtype=torch.int32, device=device) for _ in range(steps)]
    return [tokens_a_step(config) / seconds for seconds in worker.time_steps(step, ids, device)]


def rates_for(step: TrainingStep, seconds: float) -> list[float]:
    """Train until the time is over. Returns the tokens a second of each step."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        found += rates_of(step, CHUNK)
    return found


def main(argv: list[str]) -> int:
    """Measure the loop that the command line asks for. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long steps run while the GPU is read")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them: compilation, calibration, the clock")
    asked, words = parser.split(argv)
    config = parser.composed(words)
    plan = resolve(config, devices.device(config))
    step = worker.build(config, plan, vocabulary(config))
    print(f"{config.model.name}: {plan.label}, {plan.ran} {plan.recipe or ''}{plan.reason or ''}")
    rates_of(step, asked.warmup)
    rates: list[float] = []
    if plan.device == "cuda" and shutil.which("nvidia-smi"):
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
        samples = sampled(lambda: rates.extend(rates_for(step, asked.seconds)), f"GPU-{uuid}")
        print(told(samples) if samples else "nvidia-smi gave no reading")
    else:
        rates = rates_for(step, asked.seconds)
    slowest, median, fastest = min(rates), statistics.median(rates), max(rates)
    print(f"{median:,.0f} tokens/s, the median of {len(rates)} steps (slowest {slowest:,.0f}, fastest {fastest:,.0f})")
    return 0


def sampled(work: Callable[[], object], gpu: str) -> list[Sample]:
    """Read `gpu`, an id that nvidia-smi knows, every 100 ms while `work` runs."""
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", "-lms", "100"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "readings"  # a pipe would fill up, and nvidia-smi would wait
        with out.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as reader:
            try:
                work()
            finally:
                reader.terminate()
        return [sample for line in out.read_text().splitlines() if (sample := parsed(line))]


def parsed(line: str) -> Sample | None:
    """Return the reading in a line; None if it has none, as [N/A] or an error."""
    try:
        watts, megahertz, celsius, reasons = line.split(",")
        return Sample(float(watts), float(megahertz), float(celsius), int(reasons, 16))
    except ValueError:
        return None


def told(samples: list[Sample]) -> str:
    """Say the medians, and in which share of the readings each reason held."""
    watts, megahertz, celsius, _ = (statistics.median(column) for column in zip(*samples, strict=True))
    held = Counter(name for sample in samples for bit, name in enumerate(REASONS) if sample.reasons >> bit & 1)
    shares = ", ".join(f"{name} {100 * count / len(samples):.0f} %" for name, count in held.most_common())
    medians = f"{watts:.0f} W, {megahertz:,.0f} MHz, {celsius:.0f} C: medians of {len(samples)} readings"
    return f"{medians}\nthe clock is limited by: {shares or 'nothing'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
