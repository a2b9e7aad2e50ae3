"""The range of a number, written into its key's type: `Annotated[int, at_least(1)]`.

The schema is the only place that declares a range. `parsing.build` reads it there and checks it with the type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

_COUNTED_MOST = 10**12  # nothing here is counted beyond; below, what torch and the logs count in does not overflow


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`. With `open_*`, the bound itself is left out.

    `limit` is a number of `unit` that nobody has: a run would use all memory or disk before it could report that.
    """

    least: float
    most: float = math.inf
    open_least: bool = False
    open_most: bool = False
    limit: int | None = None
    unit: str = ""

    def why_not(self, value: float) -> str | None:
        """Return what is wrong with `value`; None if it is in range."""
        low = value <= self.least if self.open_least else value < self.least
        high = value >= self.most if self.open_most else value > self.most
        if low or high:
            return f"must be {self}"
        if isinstance(value, float) and value and not 1e-38 <= abs(value) <= 1e38:
            return "is beyond what float32 can hold"
        if isinstance(value, int) and value > _COUNTED_MOST:
            return f"is beyond {_COUNTED_MOST:,}"
        return f"is beyond {self.limit:,} {self.unit}" if self.limit is not None and value > self.limit else None

    def __str__(self) -> str:
        least = f"{'above' if self.open_least else 'at least'} {self.least}"
        if self.most == math.inf:
            return least
        if not self.open_least and not self.open_most:
            return f"from {self.least} to {self.most}"
        return f"{least} and {'below' if self.open_most else 'at most'} {self.most}"


def at_least(least: int, limit: int | None = None, unit: str = "") -> Range:
    """Allow `least` and more, up to `limit` of `unit`."""
    return Range(least, limit=limit, unit=unit)


def above_zero(limit: int | None = None, unit: str = "") -> Range:
    """Allow more than 0, up to `limit` of `unit`."""
    return Range(0, open_least=True, limit=limit, unit=unit)


Count = Annotated[int, at_least(1)]
Steps = Annotated[int, at_least(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Part = Annotated[float, Range(0, 1, open_most=True)]
Positive = Annotated[float, above_zero()]
Share = Annotated[float, Range(0, 1, open_least=True)]
Amount = Annotated[float, at_least(0)]
ScalingFactor = Annotated[float, at_least(1)]
Workers = Annotated[int, at_least(0, 1024, "processes")]
Scored = Annotated[int, at_least(0, 10**7, "sequences")]
Tokens = Annotated[int, at_least(0, 10**6, "tokens")]
Repeated = Annotated[int, at_least(0, 10**4, "steps, which are read before the first")]
Sequences = Annotated[int, at_least(1, 10**6, "sequences")]
Epochs = Annotated[int, at_least(1, 10**5, "passes")]
StepSequences = Annotated[int, at_least(1, 10**6, "sequences a step")]  # each is dealt out by itself
Devices = Annotated[int, at_least(1, 4096, "processes on a machine")]
