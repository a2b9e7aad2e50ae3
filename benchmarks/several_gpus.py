"""How much of n GPUs' speed is left when they train one model: each alone, all at once, then all in one run.

    python benchmarks/several_gpus.py FOLDER --gpus 0 1 -- model=gpt2 micro_batch_size=64 global_batch_size=64

The words are those of a run on one of them; the run of all has n times its `global_batch_size`. Speeds are medians over
intervals of 5 steps after the first third (slowest, fastest), as the runs log them, and the share is of n times the
slowest GPU alone. The last figure is the time from the command to the first row of the log.

This file is also the runs' plug-in: it ends their processes after the last step, since to save takes minutes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from words import Parser, environment

from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import quote
from gpt2_fp8.runtime import registry
from gpt2_fp8.train import metrics_csv

EVERY = 5
ALL = (
    "data.val_sequences=0", "optim.warmup_steps=1", "callbacks=none", "callbacks.extra=[leave]", "logger=csv",
    f"trainer.log_every_n_steps={EVERY}", "plugins=[several_gpus]",
)  # fmt: skip


@registry.callback("leave")
class Leave(pl.Callback):
    """Ends the process with the first step after the row of step `tags.leave`."""

    def __init__(self, config: RunConfig):
        self.step = int(config.tags["leave"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """End it if this is the step. A row is written in the step after its own."""
        if trainer.global_step > self.step + 1:
            os._exit(0)


@dataclass
class Run:
    """A run under way."""

    folder: Path
    process: subprocess.Popen[bytes]
    began: float
    first: float | None = None  # s

    @classmethod
    def start(cls, folder: Path, gpus: Sequence[str], steps: int, words: Sequence[str]) -> Run:
        """Start a run in a new folder."""
        folder.mkdir(parents=True)
        own = f"+tags.leave={steps}", f"trainer.max_steps={2 * steps}", f"hydra.run.dir={quote(str(folder))}"
        with (folder / "output.txt").open("wb") as output:
            command = [sys.executable, "-m", "gpt2_fp8.run", *ALL, *words, *own]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(",".join(gpus)))
        return cls(folder, process, time.monotonic())

    def rates(self) -> list[float]:
        """Wait for its end. Returns the tokens a second of its intervals; exits where it has failed."""
        while self.process.poll() is None:
            time.sleep(0.1)
            if self.first is None and self._rows():
                self.first = time.monotonic() - self.began
        rows = self._rows()
        if self.process.returncode or not rows:
            sys.exit(f"failed: see {self.folder / 'output.txt'}")
        return [row["tokens_per_second"] for row in rows if row["step"] > rows[-1]["step"] / 3]

    def _rows(self) -> list[dict[str, float]]:
        return metrics_csv.read(self.folder / "metrics.csv", ["tokens_per_second"]).rows


def main(argv: list[str]) -> int:
    """Measure what the command line asks for. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="a new one, for the runs")
    parser.add_argument("--gpus", nargs="+", required=True, help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--also", action="append", default=[], metavar="WORD", help="the run of all once more with it")
    asked, words = parser.split(argv)
    if asked.folder.exists():
        parser.error(f"{asked.folder} is there already")
    n, batch = len(asked.gpus), parser.composed(words).global_batch_size
    runs = [Run.start(asked.folder / f"alone-{gpu}", [gpu], asked.steps, ["trainer=gpu", *words]) for gpu in asked.gpus]
    try:
        slowest = min(statistics.median(run.rates()) for run in runs)
    finally:
        for run in runs:  # where one has failed
            run.process.kill()
    print(f"slowest of {n} GPUs alone: {slowest:,.0f} tokens/s", flush=True)
    for word in ("", *asked.also):
        own = ["trainer=ddp", *words, f"trainer.devices={n}", f"global_batch_size={n * batch}", *filter(None, [word])]
        run = Run.start(asked.folder / f"together{word and '-' + word}", asked.gpus, asked.steps, own)
        rates = run.rates()
        rate = statistics.median(rates)
        told = f"{rate:,.0f} tokens/s ({min(rates):,.0f}, {max(rates):,.0f}), {rate / slowest / n:.1%}"
        print(f"together{word and ', ' + word}: {told}; first row after {run.first:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
