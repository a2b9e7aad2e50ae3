"""What a GPU does under a bare loop: power, clock, temperature, and what limits the clock, as `nvidia-smi` reads them.

    python docs/studies/power.py --seconds 20 -- model=gpt2 data.tokenizer=gpt2 global_batch_size=128

The loop and its options are those of `bare_loop.py`. It is read every 100 ms while steps run, after a warm-up.
"""

from __future__ import annotations

import math
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

import bare_loop
import program
import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime.arguments import Parser

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


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for. Returns the exit code."""
    try:
        asked, words = bare_loop.read(options(), sys.argv[1:] if argv is None else argv)
        if not 0 < asked.seconds < math.inf:
            raise UserError.of(f"--seconds {asked.seconds:g} is no time above 0", "--seconds 20")
        if shutil.which("nvidia-smi") is None:
            raise UserError.of("there is no nvidia-smi here", "run it on a machine with NVIDIA's driver")
        if not torch.cuda.is_available():
            raise UserError.of("torch sees no GPU here", "python -m gpt2_fp8.doctor says why")
        loop = bare_loop.built(words)
        if loop.plan.device != "cuda":
            raise UserError.of("the loop would run on the CPU, and a GPU is read", "leave out what chooses the CPU")
        print(loop)
        loop.rates(asked.warmup)
        rates: list[float] = []
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
        samples = sampled(lambda: rates.extend(steps_for(loop, asked.seconds)), f"GPU-{uuid}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(bare_loop.told(rates), told(samples), sep="\n")
    return 0


def options() -> Parser:
    """Return a parser of what this program takes: a bare loop's options, and how long it is read."""
    found = bare_loop.parser(__doc__)
    found.add_argument("--seconds", type=float, default=20.0, help="how long steps run while the GPU is read")
    return found


def steps_for(loop: bare_loop.Loop, seconds: float) -> list[float]:
    """Train until the time is over. Returns the tokens a second of each step."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        found += loop.rates(CHUNK)
    return found


def sampled(work: Callable[[], object], gpu: str) -> list[Sample]:
    """Read `gpu`, an id that nvidia-smi knows, every 100 ms while `work` runs. Raises UserError without a reading."""
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", "-lms", "100"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "readings"  # a pipe would fill up, and nvidia-smi would wait
        with out.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as reader:
            try:
                work()
            finally:
                reader.terminate()
        text = out.read_text()
    samples = [sample for line in text.splitlines() if (sample := parsed(line))]
    if not samples:
        raise UserError.of(f"nvidia-smi gave no reading: {' '.join(text.split())}", "gpt2-fp8 doctor asks the driver")
    return samples


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
    program.run(main)
