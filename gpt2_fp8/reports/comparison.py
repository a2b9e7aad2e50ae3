"""What is known of conditions that were compared, as plain dataclasses, which `compare.json` holds as they are."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2_fp8.reports import unfinished
from gpt2_fp8.reports.conditions import Condition
from gpt2_fp8.reports.runs import Run
from gpt2_fp8.reports.spread import Difference, Spread

WINDOW = 0.05  # of the tokens that all runs have: the least width of a mean training loss
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # at which losses are shown
LEVELS = (0.5, 0.75, 1.0)  # of the tokens: whose losses are levels to be reached
COMPLETED = "completed"
CUT = (unfinished.STATUS, "stopped", "interrupted")  # runs that may go on


@dataclass(frozen=True)
class Gap:
    """A loss beside the base's: each has its spread; the difference is of the means, and of pairs of equal seeds."""

    loss: Spread
    base: Spread
    difference: Difference
    paired: Difference | None  # None if the seeds are not the same, or only one

    @property
    def relative(self) -> float:
        """The difference as a share of the base's mean loss."""
        return self.difference.value / self.base.mean


@dataclass(frozen=True)
class Reached:
    """When the mean of a condition's runs first came down to a loss, and when the base's did.

    The loss is the higher of the two after `share` of the tokens, so that both have come down to it by then.
    """

    share: float
    loss: float
    tokens: float
    seconds: float
    base_tokens: float
    base_seconds: float


@dataclass(frozen=True)
class Speed:
    """Speed and memory: medians over a run's intervals, then means over the runs."""

    tokens_per_second: Spread | None
    lowest: float | None  # the fifth and the ninety-fifth percentile of the intervals
    highest: float | None
    slow: float | None  # the share of intervals below 80 % of the run's median
    waiting: float | None  # the share of the time spent waiting for data
    mfu_bf16: float | None
    memory_gb: float | None  # GiB
    seconds: float  # of training in all


@dataclass(frozen=True)
class Gradients:
    """Norms of the gradients before clipping, over the second half of the intervals but for the largest."""

    median: float | None
    largest: float | None  # after the first tenth of the intervals
    clipped: float | None  # the share of intervals whose last gradient was clipped


@dataclass(frozen=True)
class Result:
    """What is known of a condition."""

    condition: Condition
    train: Gap | None  # at the end, the mean over `WINDOW`
    validation: Gap | None  # at the last validation that all runs have
    at_tokens: list[Gap | None]  # the training loss at `SHARES` of the tokens
    at_seconds: list[Gap | None]  # the same at shares of the time that all runs have
    to_train: list[Reached]  # at `LEVELS`; empty for the base
    to_validation: Reached | None
    speed: Speed
    gradients: Gradients
    not_comparable: str | None  # why its losses are not compared


@dataclass(frozen=True)
class Comparison:
    """Everything that is shown."""

    base: Condition
    compared: dict[str, tuple[Run, ...]]  # by a condition's name: its runs whose losses count
    results: list[Result]  # the base first
    tokens: float  # that all runs have
    seconds: float
    validated_at: float | None  # tokens
    width: float  # tokens of a mean training loss: no run logs a wider interval
    begin: float  # seconds after which every run has trained on `width` tokens: no loss is known before
