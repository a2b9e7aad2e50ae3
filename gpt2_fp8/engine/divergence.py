"""What follows from a step that went wrong. Plain Python, no tensors: the numbers are those that all ranks agree on.

not finite in FP8      the step was run again in bf16, and that counts                     (a rerun)
an FP8 tensor jumps    its largest magnitude is limited until seen again               (a magnitude)
not finite in bf16     the update is left out, the batch counts as a step                   (a skip)
`limit` skips in a row back to a checkpoint of before them, once, and on in bf16        (a rollback)
the loss stays high    likewise: more than `sigma` standard deviations above its mean, for `patience` steps in a row
any of this once more  the run ends: `Diverged`
every step was skipped the run ends so too, however few they were: it has trained nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpt2_fp8.config.errors import Diverged
from gpt2_fp8.engine.step import Verdict

WARM_UP = 100  # losses before any is judged
RATE = 0.01  # of the running mean and variance: they remember some hundred steps
FLOOR = 0.01  # the least standard deviation, as a part of the mean or of 1: a run that has fitted its text varies less
EVENTS = 1000  # kept by name; from there on they are only counted, rollbacks apart

ADVICE = (
    "a lower optim.lr, a longer optim.warmup_steps or precision=bf16 may help, "
    "from an earlier checkpoint of this run: ckpt_path=outputs/RUN/checkpoints/step-NNNNNNNN"
)


class RollBack(Exception):
    """Leaves `fit`, for the run to enter it again from a checkpoint of step `before` or earlier.

    `weights_intact`: no update has been made since `before`, so a later checkpoint serves where there is none of then.
    """

    def __init__(self, step: int, before: int, reason: str, weights_intact: bool):
        self.step, self.before, self.reason, self.weights_intact = step, before, reason, weights_intact
        super().__init__(f"step {step}: {reason}")


@dataclass(frozen=True)
class Event:
    """Something that happened in a step. `what`: rerun, magnitude, skip, spike or rollback."""

    step: int
    what: str
    reason: str


@dataclass
class LossStatistics:
    """A running mean and variance of the loss, without outliers."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def limit(self, sigma: float) -> float:
        """Losses above it are outliers; infinity while too few are known."""
        if self.count < WARM_UP:
            return math.inf
        return self.mean + sigma * max(math.sqrt(self.variance), FLOOR * max(1.0, abs(self.mean)))

    def add(self, loss: float) -> None:
        """One more loss: all weigh the same at first, then the newest weighs `RATE`."""
        self.count += 1
        rate = max(RATE, 1 / self.count)
        distance = loss - self.mean
        self.mean += rate * distance
        self.variance = (1 - rate) * (self.variance + rate * distance**2)


class DivergencePolicy:
    """Judges every step; keeps what happened for the summary and the checkpoint.

    Args:
        limit: skips in a row that lead to a rollback.
        sigma, patience: what is too high a loss (0: nothing is), and how many in a row lead to a rollback.
        say: gets a line for every event, for the log.
    """

    def __init__(self, limit: int, sigma: float, patience: int, say: Callable[[str], None]):
        self.limit, self.sigma, self.patience, self._say = limit, sigma, patience, say
        self.events: list[Event] = []
        self.reruns = self.skipped = self.rollbacks = 0
        self._skips_in_a_row = self._high_in_a_row = 0
        self._high_since = 0  # the step of the first of them
        self._statistics = LossStatistics()
        self._knows_more_than_checkpoints = False
        self._updates = self._left_out = 0  # since this process began, or went back

    def judge(self, step: int, verdict: Verdict, first: Verdict | None) -> None:
        """Take note of the finished `step`, counted from 1. `first`: of the attempt in FP8, where it was run again.

        Raises RollBack, or Diverged where the run has been rolled back before.
        """
        self.reruns += first is not None
        if verdict.skipped:
            self._skip(step, verdict, first)
            return
        self._skips_in_a_row = 0
        self._updates += 1
        if first is not None:
            self._note(step, "rerun", f"its {_culprit(first)} was not finite in FP8; run again in bf16")
        if verdict.absurd:
            reason = f"the largest magnitudes of {verdict.absurd} FP8 tensors have jumped; limited until seen again"
            self._note(step, "magnitude", reason)
        if self.sigma and verdict.loss > (limit := self._statistics.limit(self.sigma)):
            self._high(step, verdict.loss, limit)
        else:
            self._high_in_a_row = 0
            self._statistics.add(verdict.loss)

    def _skip(self, step: int, verdict: Verdict, first: Verdict | None) -> None:
        self.skipped += 1
        self._left_out += 1
        self._skips_in_a_row += 1
        both = "" if first is None else ", in FP8 and in bf16"
        reason = f"its {_culprit(verdict)} was not finite{both}; the batch is left out and counts as a step"
        self._note(step, "skip", reason)
        if self._skips_in_a_row >= self.limit:
            begun = step - self._skips_in_a_row
            reason = f"the last {self._skips_in_a_row} steps had no finite loss and gradient"
            self._back(step, begun, reason, weights_intact=True)

    def _high(self, step: int, loss: float, limit: float) -> None:
        self._high_in_a_row += 1
        if self._high_in_a_row == 1:
            self._high_since = step
            reason = f"its loss of {loss:.4g} is above {limit:.4g}, {self.sigma:g} standard deviations over the mean"
            self._note(step, "spike", reason)
        if self._high_in_a_row >= self.patience:
            reason = (
                f"the loss has stayed more than {self.sigma:g} standard deviations above its mean of "
                f"{self._statistics.mean:.4g} since step {self._high_since}"
            )
            self._back(step, self._high_since - 1, reason, weights_intact=False)

    def _back(self, step: int, before: int, reason: str, weights_intact: bool) -> None:
        if self.rollbacks:
            raise Diverged(f"diverged at step {step}, after one way back to a checkpoint: {reason}; {ADVICE}")
        self.rollbacks += 1
        self._note(step, "rollback", reason)
        raise RollBack(step, before, reason, weights_intact)

    def end(self, step: int, weights_finite: bool) -> None:
        """The run has come to its last step. Raises Diverged where it has trained nothing, or not a model."""
        if self._left_out and not self._updates:
            raise Diverged(f"none of the {self._left_out} steps up to {step} had a finite loss and gradient; {ADVICE}")
        if not weights_finite:
            raise Diverged(f"after step {step} there are weights that are not finite; {ADVICE}")

    def _note(self, step: int, what: str, reason: str) -> None:
        self._say(f"step {step}: {reason}")
        if len(self.events) < EVENTS or what == "rollback":
            self.events.append(Event(step, what, reason))

    def start_again(self) -> None:
        """After a rollback: what happened stays, whatever the checkpoint that the run goes on from knows of it."""
        self._skips_in_a_row = self._high_in_a_row = 0
        self._updates = self._left_out = 0
        self._statistics = LossStatistics()
        self._knows_more_than_checkpoints = True

    def report(self) -> dict[str, Any]:
        """What happened, as `summary.json` has it."""
        counts = {"reruns": self.reruns, "skipped": self.skipped, "rollbacks": self.rollbacks}
        return {"events": [asdict(event) for event in self.events], **counts}

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint: what happened, and what later steps are judged by."""
        rows = {"skips": self._skips_in_a_row, "high": self._high_in_a_row, "high_since": self._high_since}
        return {**self.report(), "in_a_row": rows, "statistics": asdict(self._statistics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a run where its checkpoint left it."""
        self._statistics = LossStatistics(**state["statistics"])
        if not self._knows_more_than_checkpoints:
            self.events = [Event(**event) for event in state["events"]]
            self.reruns, self.skipped, self.rollbacks = state["reruns"], state["skipped"], state["rollbacks"]
            rows = state["in_a_row"]
            self._skips_in_a_row, self._high_in_a_row = rows["skips"], rows["high"]
            self._high_since = rows["high_since"]


def _culprit(verdict: Verdict) -> str:
    return "gradient" if math.isfinite(verdict.loss) else "loss"
