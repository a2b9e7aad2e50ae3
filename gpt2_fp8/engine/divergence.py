"""What follows from a step that went wrong. Plain Python, no tensors: all ranks agree on these numbers.

- not finite in FP8: the step is run again in bf16, and that result counts (a rerun);
- the amax of an FP8 tensor is an outlier: it is limited until it is seen again (a magnitude);
- not finite in bf16: the update is left out, and the batch counts as a step (a skip);
- `limit` skips in a row: back to a checkpoint from before them, once, and on in bf16 (a rollback);
- a loss more than `sigma` standard deviations above its mean, for `patience` steps in a row: a rollback too;
- any of this a second time: the run ends (`Diverged`);
- every step is skipped: the run ends too, however few steps there were, since it has trained nothing;
- weights, or the loss of the last validation, are not finite after the last step: it has not completed either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpt2_fp8.config.errors import Diverged
from gpt2_fp8.engine.step import Verdict

WARM_UP = 100  # the first losses, which are not judged
NEWEST_WEIGHT = 0.01  # of the newest loss in the running mean and variance: they remember about a hundred steps
LEAST_DEVIATION = 0.01  # the least standard deviation, relative to the mean or to 1: a fitted run varies less
EVENTS = 1000  # recorded by name; later ones are only counted, except rollbacks
REMEDY = "a lower optim.lr, a longer optim.warmup_steps or precision=bf16 may help"


class RollBack(Exception):
    """Leaves `fit`, so that the run enters it again from a checkpoint of step `before` or earlier.

    `weights_intact`: no update has been made since `before`. A later checkpoint is then as good, if there is no earlier
    one.
    """

    def __init__(self, step: int, before: int, reason: str, weights_intact: bool):
        self.step, self.before, self.reason, self.weights_intact = step, before, reason, weights_intact
        super().__init__(f"step {step}: {reason}")


@dataclass
class LossStatistics:
    """A running mean and variance of the loss, without outliers."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def limit(self, sigma: float) -> float:
        """Return the loss above which a loss is an outlier; infinity until enough losses are known."""
        if self.count < WARM_UP:
            return math.inf
        return self.mean + sigma * max(math.sqrt(self.variance), LEAST_DEVIATION * max(1.0, abs(self.mean)))

    def add(self, loss: float) -> None:
        """Add one loss. At first all losses weigh the same; later the newest weighs `NEWEST_WEIGHT`."""
        self.count += 1
        rate = max(NEWEST_WEIGHT, 1 / self.count)
        distance = loss - self.mean
        self.mean += rate * distance
        self.variance = (1 - rate) * (self.variance + rate * distance**2)


class DivergencePolicy:
    """Judges every step; keeps what happened for the summary and the checkpoint.

    `limit`, `sigma` (0: no loss is high) and `patience`: see above. `say` is called with a line for the log for every
    event.
    """

    def __init__(self, limit: int, sigma: float, patience: int, say: Callable[[str], None]):
        self.limit, self.sigma, self.patience, self._say = limit, sigma, patience, say
        self.events: list[dict[str, Any]] = []  # step, what (rerun, magnitude, skip, spike or rollback), reason
        self.reruns = self.skipped = self.rollbacks = 0
        self._skips_in_a_row = self._high_in_a_row = 0
        self._high_since = 0  # the step of the first high loss
        self._statistics = LossStatistics()
        self._knows_more_than_checkpoints = False
        self._left_out = 0  # since this process began, or rolled back

    def judge(self, step: int, verdict: Verdict, first: Verdict | None) -> None:
        """Judge the finished `step`, counted from 1. `first`: the verdict on its FP8 attempt, if it was run again.

        Raises RollBack, or Diverged if the run has been rolled back before.
        """
        self.reruns += first is not None
        if verdict.skipped:
            self._skip(step, verdict, first)
            return
        self._skips_in_a_row = 0
        if first is not None:
            self._note(step, "rerun", f"its {_culprit(first)} was not finite in FP8; run again in bf16")
        if verdict.amax_outliers:
            reason = f"the amaxes of {verdict.amax_outliers} FP8 tensors have jumped; limited until seen again"
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
            raise Diverged(f"diverged at step {step}, after one way back to a checkpoint: {reason}; {REMEDY}")
        self.rollbacks += 1
        self._note(step, "rollback", reason)
        raise RollBack(step, before, reason, weights_intact)

    def end(self, step: int, weights_finite: bool) -> None:
        """Judge the whole run after its last step.

        Raises Diverged if it has trained nothing, or if there are weights that are not finite.
        """
        if self._left_out and not self._statistics.count:
            raise Diverged(f"none of the {self._left_out} steps up to {step} had a finite loss and gradient; {REMEDY}")
        if not weights_finite:
            raise Diverged(f"after step {step} there are weights that are not finite; {REMEDY}")

    def judge_validation(self, step: int, loss: float | None) -> None:
        """Judge the loss of the validation after the last step, if there was one. Raises Diverged."""
        if loss is not None and not math.isfinite(loss):
            raise Diverged(f"after step {step} the validation loss is not finite; {REMEDY}")

    def _note(self, step: int, what: str, reason: str) -> None:
        self._say(f"step {step}: {reason}")
        if len(self.events) < EVENTS or what == "rollback":
            self.events.append({"step": step, "what": what, "reason": reason})

    def start_again(self) -> None:
        """Reset after a rollback. The events stay: they are newer than what the checkpoint knows."""
        self._skips_in_a_row = self._high_in_a_row = 0
        self._left_out = 0
        self._statistics = LossStatistics()
        self._knows_more_than_checkpoints = True

    def report(self) -> dict[str, Any]:
        """Return what happened, in the form of `summary.json`."""
        return {"events": [*self.events], "reruns": self.reruns, "skipped": self.skipped, "rollbacks": self.rollbacks}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for the checkpoint: what happened, and what later steps are judged by."""
        rows = {"skips": self._skips_in_a_row, "high": self._high_in_a_row, "high_since": self._high_since}
        return {**self.report(), "in_a_row": rows, "statistics": asdict(self._statistics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run where its checkpoint left it."""
        self._statistics = LossStatistics(**state["statistics"])
        if not self._knows_more_than_checkpoints:
            self.events = [*state["events"]]
            self.reruns, self.skipped, self.rollbacks = state["reruns"], state["skipped"], state["rollbacks"]
            rows = state["in_a_row"]
            self._skips_in_a_row, self._high_in_a_row = rows["skips"], rows["high"]
            self._high_since = rows["high_since"]


def _culprit(verdict: Verdict) -> str:
    return "gradient" if math.isfinite(verdict.loss) else "loss"
