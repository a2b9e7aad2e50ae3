"""What does FP8 cost in loss? Trains conditions over seeds, several runs at a time, and prints a table.

    python benchmarks/fp8_gap.py FOLDER --conditions rows.txt --seeds 1 2 3 --gpus 0 1 -- model=gpt2 data=fineweb ...

Each line of the file is a condition, `NAME: WORDS`, and the table compares every other one with the first:

    bf16: precision=bf16
    fused: precision=fp8_hybrid precision.backend=fused
    bf16 until step 350: precision=bf16 @350 precision=fp8_hybrid

`@350` ends a leg after 350 steps; the words behind it continue the run. The words after `--` are every run's. All
conditions must read one text.

`--steps 100 300` ends every run after step 300 of its schedule. Its figure is then the mean training loss of steps 101
to 300, not its validation loss.

`--from 200` gives all conditions a common start. For each seed, a run with the first condition's words trains 200 steps
in FOLDER/start, and every condition goes on from its checkpoint to the end of the schedule. The figure to read is then
the difference on equal seeds: what a condition costs from that step on.

`--evaluate bf16` takes the last weights' validation loss in bf16 for the figure, so that what rounding adds to a loss
while it is computed is left out.

"at most" is the bound below which a difference is with 95 % confidence: Welch's of two means, Student's on equal seeds.

The same command continues a study: runs that are done are skipped, others go on from their last checkpoint. Exit codes:
0, 1 if a run has failed, 2 if the request is at fault, 130 if interrupted.
"""

from __future__ import annotations

import json
import math
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from words import Parser, environment

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config.run_length import last_step
from gpt2_fp8.config.schema import FP8PrecisionConfig
from gpt2_fp8.config.shown import quote
from gpt2_fp8.reports.comparison import Difference, paired_difference, welch
from gpt2_fp8.train import metrics_csv

START = "start"  # the name of the runs that others begin from
PARTS = 10  # of a run, each of which ends with a checkpoint, unless the words say how often there is one


@dataclass(frozen=True)
class Leg:
    """A part of a run with its own words. `until`: the step after which the next leg continues; None: its end."""

    words: tuple[str, ...]
    until: int | None = None


@dataclass(frozen=True)
class Job:
    """One run of a study: a condition with one seed, of `steps` optimizer steps.

    `start`: the run from whose last checkpoint it begins. `after`: its figure is the mean training loss of the steps
    after this one. `evaluate`: its figure is the last weights' loss in this precision.
    """

    study: Path
    name: str
    seed: int
    words: tuple[str, ...]
    legs: tuple[Leg, ...]
    steps: int
    start: Job | None = None
    after: int | None = None
    evaluate: str | None = None

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return folder_of(self.study, self.name) / f"seed-{self.seed}"

    @property
    def step(self) -> int:
        """The optimizer step that it goes on from."""
        last = pointers.read(self.folder / "checkpoints", "last")
        return last.step if last else self.start.steps if self.start else 0

    @property
    def trained(self) -> bool:
        """Whether the run came to its end. A window of steps can be read from a longer run as well."""
        found = _read(self.folder / "summary.json")
        steps, window = found.get("steps", 0), self.after is not None
        return found.get("status") == "completed" and (steps == self.steps or (window and steps > self.steps))

    @property
    def done(self) -> bool:
        """Whether the run has what it is for."""
        return self.trained and (self.evaluate is None or self._evaluated.exists())

    @property
    def loss(self) -> float | None:
        """The run's figure; None unless it is done and finite."""
        if not self.done:
            return None
        if self.evaluate:
            found = _read(self._evaluated).get("loss")
        elif self.after is not None:
            found = self._mean_loss(self.after)
        else:
            found = _read(self.folder / "summary.json").get("last_val_loss")
        return found if found is not None and math.isfinite(found) else None

    def command(self) -> list[str]:
        """Return the command of what is next: a leg, or the evaluation."""
        if self.trained:
            words = [f"ckpt_path={quote(str(self.folder))}", f"precision={self.evaluate}"]
            return [sys.executable, "-m", "gpt2_fp8.evaluate", *words, f"out={quote(str(self._evaluated))}"]
        leg = next((leg for leg in self.legs if leg.until is None or self.step < leg.until), self.legs[-1])
        began = any(self.folder.glob("checkpoints/*/manifest.json"))
        last = quote(str(self.start.checkpoint)) if self.start and not began else "last"
        first = f"callbacks.checkpoint_every_n_steps={max(1, self.steps // PARTS)}", "callbacks.progress_bar=false"
        own = f"hydra.run.dir={quote(str(self.folder))}", f"seed={self.seed}", f"ckpt_path={last}"
        return [sys.executable, "-m", "gpt2_fp8.run", *first, *self.words, *leg.words, *own]

    @property
    def checkpoint(self) -> Path:
        """The folder of its last step."""
        return self.folder / "checkpoints" / pointers.folder_name(self.steps)

    @property
    def _evaluated(self) -> Path:
        return self.folder / f"evaluated-{self.evaluate}.json"

    def _mean_loss(self, after: int) -> float | None:
        """Return the mean training loss of the steps after `after`. A row of the log is a mean of its steps."""
        rows = metrics_csv.read(self.folder / "metrics.csv", ["train_loss"]).rows
        before = [self.start.steps if self.start else 0, *(row["step"] for row in rows)]
        steps = [
            (row["step"] - was, row["train_loss"])
            for was, row in zip(before, rows, strict=False)
            if after < row["step"] <= self.steps
        ]
        return sum(count * loss for count, loss in steps) / sum(count for count, _ in steps) if steps else None


class Queue:
    """Runs jobs, some at a time, each on one GPU of the list; without a list on what this process sees."""

    def __init__(self, gpus: Sequence[str], at_once: int | None):
        self.places = at_once or len(gpus) or 1
        self._free: queue.Queue[str | None] = queue.Queue()
        for i in range(self.places):
            self._free.put(gpus[i % len(gpus)] if gpus else None)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = False

    def run(self, jobs: Sequence[Job]) -> bool:
        """Run what is not done of the jobs, in their order. Returns whether all are done."""
        with ThreadPoolExecutor(self.places) as pool:
            try:
                return all(list(pool.map(self._run, jobs)))
            except KeyboardInterrupt:
                self._stopping = True
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.terminate()  # a run saves first

    def _run(self, job: Job) -> bool:
        """Run the legs of a job, and its evaluation. Returns whether it is done."""
        gpu = self._free.get()
        try:
            while not job.done:
                before = job.step, job.trained
                if self._process(job, gpu) or not (job.done or (job.step, job.trained) != before):
                    if not self._stopping:
                        print(f"{job.name}, seed {job.seed}: failed; see {job.folder / 'output.txt'}", flush=True)
                    return False
            print(f"{job.name}, seed {job.seed}: {job.loss}", flush=True)
            return True
        finally:
            self._free.put(gpu)

    def _process(self, job: Job, gpu: str | None) -> int:
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(job.command(), stdout=output, stderr=output, env=environment(gpu))
        self._running.add(process)
        code = process.wait()
        self._running.discard(process)
        return code


def main(argv: list[str]) -> int:
    """Run the study that the command line asks for. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="the study's folder; each run has one in it")
    parser.add_argument("--conditions", required=True, help="a file of lines NAME: WORDS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FROM", "TO"), help="end after TO; mean training loss")
    parser.add_argument("--from", type=int, dest="start", metavar="STEP", help="one run up to STEP for all conditions")
    parser.add_argument("--evaluate", choices=["bf16", "fp32"], help="the figure: the last weights' loss in it")
    parser.add_argument("--gpus", nargs="+", default=[], help="as CUDA_VISIBLE_DEVICES names them; none: no change")
    parser.add_argument("--at-once", type=int, help="runs at a time; one for each GPU if left out")
    asked, words = parser.split(argv)
    conditions = parser.conditions(asked.conditions)
    _note(parser, asked.folder, {"words": words, "from": asked.start}, conditions)
    after, until = asked.steps or (None, None)
    every = {name: legs(parser, words, given) for name, given in conditions.items()}
    first = takewhile(lambda word: not word.startswith("@"), next(iter(conditions.values())))
    begin = legs(parser, words, [*first, f"@{asked.start or 1}"])[0][:1]
    jobs, starts = [], []
    for seed in asked.seeds:
        start = None
        if asked.start is not None:
            start = Job(asked.folder, START, seed, tuple(words), begin, asked.start)
            starts.append(start)
        for name, (parts, steps) in every.items():
            if until is not None:
                parts = legs(parser, words, [*conditions[name], f"@{until}"])[0][:-1]
            of_run = asked.folder, name, seed, tuple(words), parts, until or steps
            jobs.append(Job(*of_run, start, after, asked.evaluate))
    runs = Queue(asked.gpus, asked.at_once)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        done = runs.run(starts) and runs.run(jobs)
    except KeyboardInterrupt:
        print("interrupted: the runs save what they have; the same command continues", flush=True)
        return 130
    losses: dict[str, dict[int, float]] = {name: {} for name in conditions}
    for job in jobs:
        if (loss := job.loss) is not None:
            losses[job.name][job.seed] = loss
    print(table(losses))
    return 0 if done and all(job.loss is not None for job in jobs) else 1


def folder_of(study: Path, name: str) -> Path:
    """Return the folder of a condition, which has one for each seed."""
    return study / re.sub(r"[^\w+.-]+", "_", name)


def legs(parser: Parser, words: Sequence[str], given: Sequence[str]) -> tuple[tuple[Leg, ...], int]:
    """Return the legs of a condition, `WORDS @STEP WORDS ...`, and the last step of the schedule.

    A leg has the words that make it fail rather than fall back, and stop after its last step.
    """
    found, own, steps = [], list[str](), 0
    for word in [*given, None]:
        if word is not None and not re.fullmatch(r"@[0-9]+", word):
            own.append(word)
            continue
        config, until = parser.composed([*words, *own]), None if word is None else int(word[1:])
        added = ["precision.fallback=error"] if isinstance(config.precision, FP8PrecisionConfig) else []
        if until is not None:
            for key, there in (("plugins", config.plugins), ("callbacks.extra", config.callbacks.extra)):
                added.append(f"{key}=[{','.join(map(quote, dict.fromkeys([*there, 'stop_at'])))}]")
            added.append(f"+tags.stop_at={until}")
        found.append(Leg((*own, *added), until))
        own, steps = [], last_step(config)
    return tuple(found), steps


def table(losses: Mapping[str, Mapping[int, float]]) -> str:
    """Describe every condition by the losses of its seeds, and how far it is from the first."""
    first, *_ = losses
    width = max(map(len, [*losses, "condition"]))
    title = f"difference from {first} (standard error), at most (95 %)"
    lines = [f"{'condition':{width}}  runs    loss  deviation  {title}"]
    base = losses[first]
    for name, by_seed in losses.items():
        values = list(by_seed.values())
        if not values:
            lines.append(f"{name:{width}}  {0:4}")
            continue
        deviation = stdev(values) if len(values) > 1 else math.nan
        line = f"{name:{width}}  {len(values):4}  {fmean(values):.4f}  {deviation:9.4f}"
        if name != first and base:
            found = welch(values, list(base.values()))
            line += f"  {_told(found)}  {100 * found.value / fmean(base.values()):+.2f} %"
            if equal := sorted(by_seed.keys() & base.keys()):
                found = paired_difference([by_seed[seed] for seed in equal], [base[seed] for seed in equal])
                line += f"; on {len(equal)} equal seeds {_told(found)}"
        lines.append(line)
    return "\n".join(lines)


def _told(found: Difference) -> str:
    if found.error is None or found.above is None:
        return f"{found.value:+.4f} (of one seed)"
    return f"{found.value:+.4f} ({found.error:.4f}), at most {found.above:+.4f}"


def _note(parser: Parser, folder: Path, given: dict[str, Any], conditions: Mapping[str, Sequence[str]]) -> None:
    """Write what the runs of the folder were given; exit with 2 if it holds runs of other words."""
    path = folder / "study.json"
    before = _read(path) or given
    was = before.get("conditions", {})
    if any(before.get(key) != value for key, value in given.items()) or any(
        was.get(name, words) != words for name, words in conditions.items()
    ):
        parser.error(f"{folder} holds runs that were given other words: see {path}")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**given, "conditions": {**was, **conditions}}, indent=2))


def _read(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing without one."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
