"""How long a GPU has nothing to do between two steps of a run: after a step with a row of the log, and after others.

    python docs/studies/between_steps.py model=gpt2 data.tokenizer=gpt2 global_batch_size=64 micro_batch_size=64

It is `python -m gpt2_fp8.run` with the same words, and a last line. On a GPU, CUDA events mark where a step's work ends
and where that of the next one begins: nothing waits for them. On a CPU it is the host's clock. What a GPU waits inside
of a step is not seen; a step that is replayed from CUDA graphs has nothing of it.

Figures are medians, so that a validation or a checkpoint between two steps does not count.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import program
import torch

from gpt2_fp8 import run
from gpt2_fp8.engine.micro_batching import MicroBatching
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.runtime.moments import Moment

FIRST = 3  # the steps before it compile and record
SEVERAL = "-m", "--multirun"


class Step(NamedTuple):
    """Where a step's work begins and ends."""

    begin: Moment
    end: Moment
    row: bool  # whether the log has a row of it


@dataclass
class Marks:
    """Marks the steps of this process, from `placed` on."""

    steps: list[Step] = field(default_factory=list)
    _begin: Any = None

    def placed(self) -> None:
        """Have every step marked."""
        call, gradients = TrainingStep.__call__, MicroBatching.gradients

        def marked(step: TrainingStep, ids: torch.Tensor, *then: Any) -> None:
            call(step, ids, *then)
            number = step.schedule.last_epoch + 1  # it is not settled
            row = number % step.config.trainer.log_every_n_steps == 0
            self.steps.append(Step(self._begin, Moment(ids.device), row))

        def begun(batching: MicroBatching, ids: torch.Tensor) -> torch.Tensor:
            self._begin = Moment(ids.device)
            return gradients(batching, ids)

        TrainingStep.__call__ = marked
        MicroBatching.gradients = begun


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and print the line. Returns the run's exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if several := [word for word in argv if word in SEVERAL]:
        print(f"error: {several[0]} is several runs\n  fix: leave it out, with one value for each key", file=sys.stderr)
        return 2
    marks = Marks()
    marks.placed()
    code = run.main(argv)
    if len(marks.steps) > FIRST:
        print(told(marks.steps[FIRST - 1 :]))
    return code


def told(steps: list[Step]) -> str:
    """Say the milliseconds of a step, and of the time between two of them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    pairs = list(pairwise(steps))
    lengths = [_milliseconds(one.begin, other.begin) for one, other in pairs]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for one, other in pairs:
        gaps[one.row].append(_milliseconds(one.end, other.begin))
    medians = {row: statistics.median(found) for row, found in gaps.items() if found}
    parts = [
        f"{medians[row]:.2f} ms after a step {'with' if row else 'without'} a row of the log, of {len(gaps[row])}"
        for row in medians
    ]
    mean = sum(medians[row] * len(gaps[row]) for row in medians) / len(lengths)
    length = statistics.median(lengths)
    share = f"{mean:.2f} ms a step in the mean, {100 * mean / length:.1f} % of it"
    return f"{length:.2f} ms a step; without work {'; '.join(parts)}; {share}"


def _milliseconds(begin: Moment, end: Moment) -> float:
    return 1000 * end.seconds_since(begin)


if __name__ == "__main__":
    program.run(main)
