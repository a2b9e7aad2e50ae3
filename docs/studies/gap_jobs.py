"""What a study is asked for, as jobs: composes every leg of every condition, and refuses what cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from pathlib import Path

import rows
from evaluated import Evaluated
from gap_same import other_run, other_text
from jobs import START, Job, Start
from rows import Leg

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show, value_of
from gpt2_fp8.config.run_length import bf16_last_steps, last_step, steps_in_fp8
from gpt2_fp8.config.schema import RunConfig

KEPT = {  # keys that the study sets in each run, and what to do instead
    "seed": "leave it out, and give --seeds 1 2 3",
    "hydra.run.dir": "leave it out: the study's first word is the folder of its runs",
    "ckpt_path": "leave it out: each run goes on from its last checkpoint",
    "callbacks.progress_bar": "leave it out",
    "precision.fallback": "leave it out: a run that cannot have its precision fails",
    "tags.stop_at": "leave it out: @STEP between the words of a row ends a leg",
}
NO_END = {  # keys that begin or end a run in a way that cannot be compared, and what to do instead
    "init_from": ("runs begin from a seed, or with --from STEP from a checkpoint", "leave it out"),
    "trainer.max_epochs": ("no epochs are counted here", "trainer.max_steps=NUMBER"),
    "trainer.max_time": ("runs are compared after equal steps", "leave it out"),
    "trainer.fast_dev_run": ("such a run leaves nothing to compare", "leave it out, and give trainer.max_steps=20"),
}


@dataclass(frozen=True)
class Study:
    """What the command line asks for.

    `start`: the step of the common start. `window`: the steps of `--steps`. `evaluate`: the precision of `--evaluate`.
    """

    folder: Path
    conditions: Mapping[str, tuple[Leg, ...]]
    seeds: Sequence[int]
    words: Sequence[str]
    window: tuple[int, int] | None = None
    start: int | None = None
    evaluate: str | None = None

    def jobs(self) -> list[Job]:
        """Return every job, seed by seed: a study that is stopped has equal seeds of all conditions.

        Raises UserError for what is refused.
        """
        rows.refuse_shared_folders(list(self.conditions), self.taken)
        for seed in dict.fromkeys((min(self.seeds), max(self.seeds))):  # another key may follow it, or not
            configs = self._composed(seed)
            problems: rows.Problems = {}
            for name, found in configs.items():
                for problem in self._problems(name, found, next(iter(configs.values()))[0]):
                    problems.setdefault(problem, name)
            rows.refuse(problems)
        seeds = list(dict.fromkeys(self.seeds))
        starts = dict.fromkeys(seeds) if self.start is None else self._starts(seeds, configs)
        return [self._job(name, seed, found, starts[seed]) for seed in seeds for name, found in configs.items()]

    @property
    def taken(self) -> dict[str, str]:
        """Names in the study's folder that are not a condition's, and what they are."""
        return {"study.json": "the study's note"} | ({} if self.start is None else {START: "that of the common start"})

    @property
    def start_words(self) -> tuple[str, ...]:
        """The words of the common start: those of the first condition's first leg."""
        return next(iter(self.conditions.values()))[0].words

    def _composed(self, seed: int) -> dict[str, list[RunConfig]]:
        problems: rows.Problems = {}
        rows.composed("--seeds", (), {}, problems, [f"seed={seed}"])
        made: dict[str, list[RunConfig]] = {}
        for name, legs in self.conditions.items():
            found = [rows.composed(name, [*self.words, *leg.words], KEPT, problems, [f"seed={seed}"]) for leg in legs]
            made[name] = [config for config in found if config is not None]
        rows.refuse(problems)
        return made

    def _job(self, name: str, seed: int, configs: list[RunConfig], start: Start | None) -> Job:
        legs = self.conditions[name]
        after, until = self.window or (None, None)
        legs = (*legs[:-1], replace(legs[-1], until=until))
        legs = tuple(leg.with_own_words(config) for leg, config in zip(legs, configs, strict=True))
        of_run = self.folder, name, seed, legs, tuple(self.words), until or last_step(configs[-1]), after, start
        return Job(*of_run) if self.evaluate is None else Evaluated(*of_run, self.evaluate)

    def _starts(self, seeds: Sequence[int], configs: Mapping[str, list[RunConfig]]) -> dict[int, Start | None]:
        assert self.start is not None
        legs = (Leg(self.start_words, self.start).with_own_words(next(iter(configs.values()))[0]),)
        return {seed: Start(self.folder, START, seed, legs, tuple(self.words), self.start) for seed in seeds}

    def _problems(self, name: str, configs: list[RunConfig], first: RunConfig) -> Iterator[Problem]:
        """Yield what is wrong with a condition. `first`: the first one's first leg, which the common start trains."""
        if unfit := list(_no_end(configs)):
            yield from unfit
            return
        steps = last_step(configs[-1])
        if self.window is not None:
            yield from self._window(self.window, steps, configs)
            steps = self.window[1]
        elif any(config.data.val_sequences == 0 for config in configs):
            yield Problem("data.val_sequences=0, and the table is of validation losses", "leave it out")
        if self.start is not None and not 0 < self.start < steps:
            remedy = f"--from {max(1, steps // 4)}" if steps > 1 else "leave --from out"
            yield Problem(f"--from {self.start} of {steps} steps", remedy)
        marks = [leg.until for leg in self.conditions[name][:-1] if leg.until is not None]
        begin = self.start or 0
        if marks != sorted(set(marks)) or any(not begin < mark < steps for mark in marks):
            cause = f"@{marks} of {steps} steps" + (f" from {begin}" if begin else "")
            yield Problem(cause, f"each @N is later than the one before{' and --from' if begin else ''}, and no end")
        yield from _tails([begin, *marks, steps], configs)
        for before, config in zip([first if self.start is not None else configs[0], *configs], configs, strict=False):
            yield from other_run(before, config)
        if self.start is None:
            yield from other_text(first, configs[0], trained=self.window is not None)

    def _window(self, window: tuple[int, int], steps: int, configs: list[RunConfig]) -> Iterator[Problem]:
        (after, until), every = window, max(config.trainer.log_every_n_steps for config in configs)
        asked = f"--steps {after} {until}"
        if not 0 <= after < until <= steps or until - after < every:
            cause = f"{asked} of {steps}, logged every {every} steps"
            yield Problem(cause, "name two steps of the run with a row of the log between them")
        elif self.start is not None and after < self.start < until:
            cause = f"{asked}, and all conditions are one run up to --from {self.start}"
            yield Problem(cause, f"--steps {self.start} {until if until - self.start >= every else steps}")
        elif (after % every and after != self.start) or (until % every and until != steps):
            cause = f"{asked}, and the log has a row every {every} steps, of which one is cut"
            yield Problem(cause, f"trainer.log_every_n_steps={gcd(after, until)}, or multiples of {every}")
        if not all(config.logger.csv for config in configs):
            yield Problem("logger.csv=false, and the figure of --steps is read from metrics.csv", "logger.csv=true")


def _tails(marks: Sequence[int], configs: Sequence[RunConfig]) -> Iterator[Problem]:
    """Yield that last steps in bf16 are fewer than a leg asks for. `marks`: where legs begin, and the last one ends."""
    before = None  # where those of the leg before begin
    for (begin, end), config in zip(pairwise(marks), configs, strict=True):
        asked, after = bf16_last_steps(config), steps_in_fp8(config)
        cause = f"precision.bf16_last_steps={asked} begins after step {after}, and the row's steps "
        if asked and after < begin and after != before:
            fewer = f"precision.bf16_last_steps={last_step(config) - begin}"
            yield Problem(f"{cause}after step {begin}", f"{fewer}, or an earlier --from or @STEP")
        elif asked and after >= end:
            yield Problem(f"{cause}end at {end}", "leave it out of these steps, or end them later")
        before = after if asked else None


def _no_end(configs: list[RunConfig]) -> Iterator[Problem]:
    for key, (reason, remedy) in NO_END.items():
        for value in (value_of(config, key) for config in configs):
            if value is not None and value is not False:
                yield Problem(f"{key}={show(value)}, and {reason}", remedy)
