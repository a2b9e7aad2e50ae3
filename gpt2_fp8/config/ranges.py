"""The range of a number, written into its key's type: `Annotated[int, at_least(1)]`.

The schema is the only place that declares a range. `parsing.build` reads it there and checks it with the type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple


class Refusal(NamedTuple):
    """Why a number is out of range, and what to choose instead. The remedy may name the key as `{key}`."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, and what to say of others. With `open_*`, the bound itself is left out.

    `limit` is a number of `unit` that nobody has: a run would use all memory or disk before it could report that.
    """

    least: float
    said: Refusal
    most: float = math.inf
    open_least: bool = False
    open_most: bool = False
    limit: int | None = None
    unit: str = ""

    def refusal(self, value: float) -> Refusal | None:
        """Say what is wrong with `value`; None if it is in range."""
        low = value <= self.least if self.open_least else value < self.least
        high = value >= self.most if self.open_most else value > self.most
        if low or high:
            return self.said
        if isinstance(value, float):
            if value and not 1e-38 <= abs(value) <= 1e38:
                return _FLOAT32
        elif value > _COUNTED_MOST:
            return _COUNTED
        if self.limit is not None and value > self.limit:
            return Refusal(f"is beyond {self.limit:,} {self.unit}", f"{{key}}={self.limit} or less")
        return None


_COUNTED_MOST = 10**12  # nothing here is counted beyond; below, what torch and the logs count in does not overflow
_COUNTED = Refusal("is beyond 1,000,000,000,000", "choose a number that can be reached")
_FLOAT32 = Refusal("is beyond what float32 can hold", "choose from 1e-38 to 1e38")


def at_least(least: int, limit: int | None = None, unit: str = "", said: Refusal | None = None) -> Range:
    """Allow `least` and more, up to `limit` of `unit`."""
    reason = "must not be negative" if least == 0 else f"must be at least {least}"
    return Range(least, said or Refusal(reason, f"choose {least} or more"), limit=limit, unit=unit)


def above_zero(limit: int | None = None, unit: str = "", said: Refusal | None = None) -> Range:
    """Allow more than 0, up to `limit` of `unit`."""
    said = said or Refusal("must be above 0", "choose a value above 0")
    return Range(0, said, open_least=True, limit=limit, unit=unit)


def above_zero_to_one(such_as: str = "1e-5") -> Range:
    """Allow more than 0, and up to 1."""
    return Range(0, Refusal("must be above 0 and at most 1", f"choose a value such as {such_as}"), 1, open_least=True)


def from_to(least: int, most: int, remedy: str | None = None) -> Range:
    """Allow `least` to `most`, both included."""
    return Range(least, Refusal(f"must be from {least} to {most}", remedy or f"choose from {least} to {most}"), most)


def below_one(such_as: str = "0.1") -> Range:
    """Allow 0 and more, but less than 1."""
    return Range(0, Refusal("must be at least 0 and below 1", f"choose a value such as {such_as}"), 1, open_most=True)


Count = Annotated[int, at_least(1)]
Steps = Annotated[int, at_least(0)]
Seed = Annotated[int, from_to(0, 2**32 - 1, "choose another seed, such as 1337")]
Part = Annotated[float, below_one()]
KeptPart = Annotated[float, below_one("0.95")]  # of a mean over steps, at each step
Positive = Annotated[float, above_zero()]
Amount = Annotated[float, at_least(0)]
Epsilon = Annotated[float, above_zero_to_one()]
ScalingFactor = Annotated[float, at_least(1)]
Workers = Annotated[int, at_least(0, 1024, "processes")]
Scored = Annotated[int, at_least(0, 10**7, "sequences")]
Tokens = Annotated[int, at_least(0, 10**6, "tokens")]
Repeated = Annotated[int, at_least(0, 10**4, "steps, which are read before the first")]
Sequences = Annotated[int, at_least(1, 10**6, "sequences")]
Epochs = Annotated[int, at_least(1, 10**5, "passes")]
StepSequences = Annotated[int, at_least(1, 10**6, "sequences a step")]  # each is dealt out by itself
_DEVICES = Refusal("is no number of devices", "trainer.devices=auto for every GPU, or trainer=cpu")
Devices = Annotated[int, at_least(1, 4096, "processes on a machine", _DEVICES)]
