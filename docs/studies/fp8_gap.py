"""Which part of FP8 costs loss? Trains the runs of a study, several at a time, and prints its table.

    python docs/studies/fp8_gap.py FOLDER --seeds 1 2 3 --gpus 0 1 2 3 --at-once 8 -- model=gpt2 data=fineweb ...
    python docs/studies/fp8_gap.py FOLDER --conditions rows.txt --seeds 1 2 3 -- model=gpt2 ...

Without `--conditions` it is a fractional factorial over six operands of the emulated backend (`factorial.py`). With it,
each line of the file is a condition, `NAME: WORDS`, and the table compares every other one with the first:

    bf16: precision=bf16
    fused: precision=fp8_hybrid precision.backend=fused
    bf16 until step 350: precision=bf16 @350 precision=fp8_hybrid

`@350` ends a leg after 350 steps; the words behind it continue the run. The words after `--` are every run's.

`--steps 100 300` ends every run after step 300 of its schedule. Its figure is then the mean training loss of steps 101
to 300, not its validation loss. So short runs can be compared, by a figure that hardly depends on the last step.

The same command continues where it was stopped: runs that are done are skipped, others go on from their last
checkpoint. It ends with 0 if every run is done, 1 if one has failed, 2 if the request is at fault, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from factorial import EMULATED, FACTORS, condition, main_effects, settings
from jobs import Job, Leg, Queue
from statistics_of import Effect, difference, mean_and_deviation, paired

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.run_length import last_step


def main(argv: list[str] | None = None) -> int:
    """Run the study that the command line asks for. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    mark = argv.index("--") if "--" in argv else len(argv)
    options, words = _parser().parse_args(argv[:mark]), argv[mark + 1 :]
    try:
        rows = _rows(options.conditions)
        jobs = _jobs(options.folder, rows, options.seeds, words, options.steps)
        _same_study(options.folder, words)
    except UserError as error:
        print(error if options.conditions else _of_common(error), file=sys.stderr)
        return 2
    code = Queue(jobs, options.gpus, options.at_once).run()
    losses = {name: {job.seed: job.loss for job in jobs if job.name == name and job.loss is not None} for name in rows}
    print(_table(losses) if options.conditions else _effects(losses))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s FOLDER [options] -- [what every run is given]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="the study's folder; each run has one in it")
    parser.add_argument("--conditions", type=Path, help="a file of lines NAME: WORDS; without it, the factorial")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FROM", "TO"), help="end after TO; mean training loss")
    parser.add_argument("--gpus", nargs="+", default=[], help="as CUDA_VISIBLE_DEVICES names them; none: no change")
    parser.add_argument("--at-once", type=int, help="runs at a time; one for each GPU if left out")
    return parser


def _rows(conditions: Path | None) -> dict[str, tuple[Leg, ...]]:
    """Return the legs of every condition by its name. Raises UserError."""
    if conditions is None:
        return {condition(on): (Leg(settings(on)),) for on in EMULATED}
    rows: dict[str, tuple[Leg, ...]] = {}
    try:
        lines = conditions.read_text().splitlines()
    except OSError as error:
        raise UserError.of(f"--conditions {conditions}: {error.strerror}", "name a file of lines NAME: WORDS") from None
    for line in filter(str.strip, lines):
        name, colon, words = line.partition(":")
        if not colon or name.strip() in rows:
            raise UserError.of(f"{conditions}: {line!r} is no new condition", "write NAME: WORDS, each name once")
        rows[name.strip()] = Leg.parse(words)
    return rows


def _jobs(
    folder: Path, rows: dict[str, tuple[Leg, ...]], seeds: list[int], words: list[str], window: list[int] | None = None
) -> list[Job]:
    """Return every job, all seeds of a condition after each other. Raises UserError for words that are refused.

    `window`: the steps of `--steps`.
    """
    jobs = []
    after, until = window or (None, None)
    for name, legs in rows.items():
        configs = [compose.preflight([*words, *leg.words])[0] for leg in legs]
        if configs[-1].trainer.max_epochs is not None:
            raise UserError.of(
                f"{name}: trainer.max_epochs, and no epochs are counted here", "trainer.max_steps=NUMBER"
            )
        steps = last_step(configs[-1])
        if after is not None and until is not None:
            if not 0 <= after < until <= steps or until - after < configs[-1].trainer.log_every_n_steps:
                every = configs[-1].trainer.log_every_n_steps
                cause = f"{name}: --steps {after} {until} of {steps}, logged every {every} steps"
                raise UserError.of(cause, "name two steps of the run with a row of the log between them")
            legs, steps = (*legs[:-1], replace(legs[-1], until=until)), until
        elif any(config.data.val_sequences == 0 for config in configs):
            raise UserError.of(f"{name}: data.val_sequences=0, and the table is of validation losses", "leave it out")
        marks = [leg.until for leg in legs[:-1] if leg.until is not None]
        if marks != sorted(set(marks)) or any(not 0 < mark < steps for mark in marks):
            raise UserError.of(f"{name}: @{marks} of {steps} steps", "each @N is later than the one before, and no end")
        jobs += [Job(folder, name, seed, legs, tuple(words), steps, after) for seed in dict.fromkeys(seeds)]
    return jobs


def _of_common(error: UserError) -> UserError:
    """Return what is wrong with the factorial; no remedy changes a key that its conditions set."""
    own = [word.partition("=")[0] for word in settings(())]
    problems = []
    for cause, remedy in error.problems:
        ways = [way for way in remedy.split(", or ") if not any(key in way for key in own)]
        instead = f"other words after --, such as model=gpt2 alone; the study sets {' and '.join(own)}"
        problems.append(Problem(cause, ", or ".join(ways) or instead))
    return UserError(problems)


def _same_study(folder: Path, words: list[str]) -> None:
    """Note the words of all runs in the folder. Raises UserError if it holds runs with others."""
    note = folder / "study.json"
    if note.exists() and json.loads(note.read_text())["words"] != words:
        raise UserError.of(f"{folder} holds runs that were given other words: see {note}", "name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"words": words}, indent=1) + "\n")


def _table(losses: dict[str, dict[int, float]]) -> str:
    """Describe every condition by the losses of its seeds, and how far it is from the first."""
    first, *_ = losses
    width = max(map(len, losses))
    lines = [f"{'condition':{width}}  runs    loss  deviation  difference from {first} (standard error)"]
    base = list(losses[first].values())
    for name, by_seed in losses.items():
        values = list(by_seed.values())
        if not values:
            lines.append(f"{name:{width}}  {0:4}")
            continue
        mean, deviation = mean_and_deviation(values)
        line = f"{name:{width}}  {len(values):4}  {mean:.4f}  {deviation:9.4f}"
        if name != first and base:
            line += f"  {_of(difference(values, base), mean_and_deviation(base)[0])}"
            effect, count = paired(by_seed, losses[first])
            line += f"; on {count} equal seeds {effect.value:+.4f} ({effect.error:.4f})" if count else ""
        lines.append(line)
    return "\n".join(lines)


def _effects(losses: dict[str, dict[int, float]]) -> str:
    """Describe the main effect of every operand: what its FP8 adds to the loss."""
    if missing := [name for name, values in losses.items() if not values]:
        return f"no table yet: {len(missing)} of {len(losses)} conditions have no run that is done"
    seeds = {name: list(values.values()) for name, values in losses.items()}
    grand = mean_and_deviation([mean_and_deviation(values)[0] for values in seeds.values()])[0]
    lines = [_table(losses), "", "operand          effect of FP8 on the loss (standard error)"]
    lines += [f"{name:15}  {_of(effect, grand)}" for name, effect in zip(FACTORS, main_effects(seeds), strict=True)]
    return "\n".join(lines)


def _of(effect: Effect, base: float) -> str:
    error = f"{effect.error:.4f}"
    return f"{effect.value:+.4f} ({error})  {100 * effect.value / base:+.2f} %"


if __name__ == "__main__":
    sys.exit(main())
