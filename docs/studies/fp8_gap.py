"""Which part of FP8 costs loss? Trains the runs of a study, several at a time, and prints its table.

    python docs/studies/fp8_gap.py FOLDER --seeds 1 2 3 --gpus 0 1 2 3 --at-once 8 -- model=gpt2 data=fineweb ...
    python docs/studies/fp8_gap.py FOLDER --conditions rows.txt --seeds 1 2 3 -- model=gpt2 ...

Without `--conditions` it is a fractional factorial over six operands of the emulated backend (`factorial.py`). With it,
each line of the file is a condition, `NAME: WORDS`, and the table compares every other one with the first:

    bf16: precision=bf16
    fused: precision=fp8_hybrid precision.backend=fused
    bf16 until step 350: precision=bf16 @350 precision=fp8_hybrid

`@350` ends a leg after 350 steps; the words behind it continue the run. The words after `--` are every run's. A line
that begins with `#` says nothing.

`--steps 100 300` ends every run after step 300 of its schedule. Its figure is then the mean training loss of steps 101
to 300, not its validation loss. So short runs can be compared, by a figure that hardly depends on the last step.

`--from 200` gives all conditions a common start. For each seed, a run with the first condition's words trains 200 steps
in FOLDER/start, and every condition, the first too, goes on from its checkpoint to the end of the schedule. Runs that
begin from one checkpoint stay close to each other. So the figure to read is the difference on equal seeds: its error is
much smaller than that of two means, which have the spread of the starts in them. It is what a condition costs from
that step on, not from the beginning.

`--evaluate bf16` evaluates the last weights of every run in bf16, once it is done, and takes that for its figure. So a
condition is judged by what it has learnt, without what rounding adds to a loss while it is computed.

"at most" is the bound below which a difference is with 95 % confidence: Welch's of two means, Student's on equal seeds.

The figures of a table are of one text: a row that would change it is refused. Runs of another code, another torch or
another GPU, as of a study that was continued elsewhere, are named under the table.

Runs begin seed by seed, so that a study that is stopped can compare the seeds that it has. Each tenth of a run ends
with a checkpoint, unless the words say how often there is one. On Linux a killed study ends its runs, which save first.

A run that computes in another precision than it was asked for has failed, as one that fails. To train it again, delete
its folder. The same command continues where it was stopped: runs that are done are skipped, others go on from their
last checkpoint. It ends with 0 if every run is done, 1 if one has failed, 2 if the request is at fault, 130 if
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import gap_alike
import gap_note
import program
import rows
from factorial import EMULATED, condition, settings
from gap_jobs import Study
from gap_table import effects, table
from jobs import Job
from queue_of import Queue
from rows import Leg

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.runtime.arguments import Parser

_LEAVE = "leave it out: the factorial sets it; --conditions FILE trains other rows"
FACTORIAL = dict.fromkeys(("precision.backend", "precision.emulate"), _LEAVE)  # keys that its conditions set


def main(argv: list[str] | None = None) -> int:
    """Run the study that the command line asks for. Returns the exit code."""
    try:
        options, study = read(sys.argv[1:] if argv is None else argv)
        jobs = study.jobs() if options.conditions is not None else _of_factorial(study)
        gap_note.keep(study)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    code = Queue(jobs, options.gpus, options.at_once).run()
    losses: dict[str, dict[int, float]] = {name: {} for name in study.conditions}
    done = []
    for job in jobs:
        if (loss := job.loss) is not None:
            losses[job.name][job.seed] = loss
            done.append(job)
    print(table(losses) if options.conditions is not None else effects(losses))
    for line in gap_alike.unlike(done):
        print(line)
    return code


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, Study]:
    """Return the options of a command line, and the study that it asks for. Raises UserError."""
    argv = list(argv)
    mark = argv.index("--") if "--" in argv else len(argv)
    options, words = _parser().parse_args(argv[:mark]), argv[mark + 1 :]
    if options.at_once is not None and options.at_once < 1:
        raise UserError.of(f"--at-once {options.at_once} is less than 1", "--at-once 1")
    if not options.folder.strip():
        raise UserError.of("FOLDER is an empty word", "name the study's folder as the first word: outputs/my_study")
    if options.conditions is not None:
        conditions = rows.read(options.conditions)
    else:
        conditions = {condition(on): (Leg(settings(on)),) for on in EMULATED}
        if problems := list(rows.overridden(words, FACTORIAL)):
            raise UserError(problems)
    if options.evaluate and options.steps:
        cause = f"--evaluate {options.evaluate} is about the last weights, and --steps about a mean training loss"
        raise UserError.of(cause, "leave one of them out")
    window = (options.steps[0], options.steps[1]) if options.steps else None
    folder = Path(options.folder)
    return options, Study(folder, conditions, options.seeds, words, window, options.start, options.evaluate)


def _of_factorial(study: Study) -> list[Job]:
    """Return the factorial's jobs. Raises UserError, of which no remedy changes a key that its conditions set."""
    try:
        return study.jobs()
    except UserError as error:
        problems = []
        for cause, remedy in error.problems:
            ways = [way for way in remedy.split(", or ") if not any(key in way for key in FACTORIAL)]
            instead = f"other words after --, such as model=gpt2 alone; the study sets {' and '.join(FACTORIAL)}"
            problems.append(Problem(cause, ", or ".join(ways) or instead))
        raise UserError(problems) from None


def _parser() -> Parser:
    parser = Parser(
        usage="%(prog)s FOLDER [options] -- [what every run is given]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("folder", help="the study's folder; each run has one in it")
    parser.add_argument("--conditions", help="a file of lines NAME: WORDS; without it, the factorial")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FROM", "TO"), help="end after TO; mean training loss")
    parser.add_argument("--from", type=int, dest="start", metavar="STEP", help="one run up to STEP for all conditions")
    parser.add_argument("--evaluate", choices=["bf16", "fp32"], help="the figure: the last weights' loss in it")
    parser.add_argument("--gpus", nargs="+", default=[], help="as CUDA_VISIBLE_DEVICES names them; none: no change")
    parser.add_argument("--at-once", type=int, help="runs at a time; one for each GPU if left out")
    return parser


if __name__ == "__main__":
    program.run(main)
