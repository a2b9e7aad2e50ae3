"""Red flags: what a reading of FP8 tensors' health, or a row of the log, says that a person should know. No tensors.

Each flag is one line for the log: what is wrong with which tensor, the figure, and what to do. A flag that several
tensors raise at once is one line, which names the worst. It is said again for the same tensor only after `QUIET`
readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gpt2_fp8.config.schema import DelayedRecipe, StatelessRecipe
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.fp8.fp8_tensors import at_limit

SATURATED = 1e-3  # the share of a tensor from which it is said; healthy runs stay below a thirtieth of it
LAG = 2  # sampled readings in a row, of a scale that follows its tensor: once is a tensor that grows in its first steps
FLUSHED = 0.25  # the same; measured in docs/what-to-watch.md
JUMP = 6.0  # powers of two between two readings
SETTLED = 10  # readings with jumps that are not judged: scales find their place
UNSTEADY, IN_A_ROW = 2.0, 5  # powers of two in each of so many readings
QUIET = 50  # readings after which a flag of the same tensor is said again
SIGMAS = 8.0  # a spike of the loss is so many standard deviations above the intervals before it
RECENT = 20  # intervals that a loss is compared with
LEAST = 0.02  # the least rise that is a spike, relative to the loss: a fitted run hardly varies
NORMAL = 1.4826  # of a normal distribution: its standard deviation over its median absolute deviation
QUARTER = 25  # intervals that are compared with as many before them, at least; later a quarter of the run
WAIT, WAITS = 0.05, 5  # waiting for data: a part of the time, in each of so many intervals
QUIET_ROWS = 100  # intervals after which a flag of the run is said again
Recipe = DelayedRecipe | StatelessRecipe


@dataclass(frozen=True)
class Found:
    """A flag that one tensor raises. `badness` orders those of one kind; `text` says the figure."""

    kind: str
    health: Health
    badness: float
    text: str
    remedy: str


@dataclass
class FP8RedFlags:
    """Judges readings of a run under `recipe`; calls `say` with each line.

    `warm_up`: steps of the learning rate's warm-up, in which jumps are not judged.
    """

    recipe: Recipe
    warm_up: int
    say: Callable[[str], object]
    _readings: int = 0
    _said: dict[tuple[str, str], int] = field(default_factory=dict)  # at which reading, by flag and tensor
    _moved: dict[str, int] = field(default_factory=dict)  # readings in a row in which a tensor's scale has moved far
    _cut: dict[str, int] = field(default_factory=dict)  # sampled readings in a row in which it saturates

    def judge(self, step: int, healths: Sequence[Health]) -> None:
        """Judge one reading, made after `step`."""
        self._readings += 1
        settled = step > self.warm_up and self._readings > SETTLED
        by_kind: dict[str, list[Found]] = {}
        for found in self._all_found(healths, settled):
            by_kind.setdefault(found.kind, []).append(found)
        for kind, several in by_kind.items():
            self._say(step, kind, several)

    def _say(self, step: int, kind: str, several: list[Found]) -> None:
        keys = {(kind, str(found.health.tensor)) for found in several}
        news = {key for key in keys if self._readings - self._said.get(key, -QUIET) >= QUIET}
        if not news:
            return
        self._said |= dict.fromkeys(keys, self._readings)
        worst = max(several, key=lambda found: found.badness)
        others = f" (and of {len(several) - 1} other tensors)" if len(several) > 1 else ""
        self.say(f"step {step}: FP8: {worst.text}{others}; {worst.remedy}")

    def _all_found(self, healths: Iterable[Health], settled: bool) -> Iterator[Found]:
        for health in healths:
            if found := self._of_scale(health):
                yield found  # its shares follow from that
            else:
                yield from self._of_shares(health)
                yield from self._of_jumps(health, settled)

    def _of_scale(self, health: Health) -> Found | None:
        tensor, lower = health.tensor, f"a lower optim.lr; {_in_bf16(health)} keeps the layer in bf16"
        if not math.isfinite(health.amax):
            return Found("amax", health, math.inf, f"the amax of {tensor} is {health.amax}", lower)
        if health.amax == 0:
            remedy = "nothing is learnt there; a lower optim.lr, from an earlier checkpoint"
            return Found("zero", health, 0, f"the amax of {tensor} is 0: every value of it is", remedy)
        if at_limit(health.scale):
            text = f"the scale of {tensor} is {health.scale:.3g}, at an amax of {health.amax:.3g}"
            return Found("scale", health, math.inf, text, lower)
        return None

    def _of_shares(self, health: Health) -> Iterator[Found]:
        tensor, name = health.tensor, str(health.tensor)
        if health.saturated is not None:
            self._cut[name] = self._cut.get(name, 0) + 1 if health.saturated > SATURATED else 0
        lag = LAG if isinstance(self.recipe, DelayedRecipe) else 1
        if health.saturated is not None and self._cut[name] >= lag:
            text = f"{health.saturated:.2%} of {tensor} saturates (headroom {health.headroom:.2f})"
            yield Found("saturated", health, health.saturated, text, self._more_headroom(health))
        if health.flushed is not None and health.flushed > FLUSHED and not tensor.of_logits:
            text = f"{health.flushed:.0%} of {tensor} becomes 0 (headroom {health.headroom:.2f})"
            yield Found("flushed", health, health.flushed, text, self._less_headroom(health))

    def _of_jumps(self, health: Health, settled: bool) -> Iterator[Found]:
        if health.jump is None:
            return
        name, size = str(health.tensor), abs(health.jump)
        self._moved[name] = self._moved.get(name, 0) + 1 if size > UNSTEADY else 0
        if not settled:
            return
        remedy = "once is harmless; if it comes again, a lower optim.lr or optim.max_grad_norm"
        if size > JUMP:
            text = f"the scale of {name} has changed by 2^{health.jump:.1f}, to {health.scale:.3g}"
            yield Found("jump", health, size, text, remedy)
        if self._moved[name] >= IN_A_ROW:
            text = f"the scale of {name} does not settle: more than 2^{UNSTEADY:g} in each of {IN_A_ROW} readings"
            yield Found("unsteady", health, size, text, "a lower optim.lr, or a longer optim.warmup_steps")

    def _more_headroom(self, health: Health) -> str:
        if isinstance(self.recipe, DelayedRecipe):
            lacking = math.ceil(-health.headroom) if math.isfinite(health.headroom) else 1
            margin = self.recipe.margin + max(1, lacking)
            return f"recipe=delayed recipe.margin={margin} leaves more headroom, or {_in_bf16(health)}"
        return f"{_in_bf16(health)} keeps the layer in bf16"

    def _less_headroom(self, health: Health) -> str:
        if isinstance(self.recipe, DelayedRecipe) and self.recipe.margin > 0:
            return f"recipe=delayed recipe.margin=0 leaves less headroom, or {_in_bf16(health)}"
        if health.tensor.kind == "gradient" and health.tensor.format == "e4m3":
            return f"precision=fp8_hybrid has gradients of more range, or {_in_bf16(health)}"
        return f"{_in_bf16(health)} keeps the layer in bf16, or recipe=block"


def _in_bf16(health: Health) -> str:
    return f"precision.keep_bf16='[{health.tensor.layer}]'"


@dataclass
class RunWatch:
    """Judges each row of the training log, of an interval, in any precision; calls `say` with each line.

    Statistics are medians, so one odd interval moves nothing.

    `warm_up`: steps of the learning rate's warm-up, in which the loss is not judged. `workers`: `data.num_workers`, or
    of a mixture that of each source, by their keys.
    """

    warm_up: int
    workers: Mapping[str, int]
    say: Callable[[str], object]
    _losses: list[float] = field(default_factory=list)
    _waits: int = 0  # intervals in a row
    _rows: int = 0
    _said: dict[str, int] = field(default_factory=dict)

    def see(self, step: int, row: Mapping[str, float]) -> None:
        """Judge one row, of the interval that ends with `step`: `train_loss`, and `data_wait` from the second on."""
        self._rows += 1
        self._loss(step, row["train_loss"])
        self._wait(step, row.get("data_wait", 0.0))

    def _loss(self, step: int, loss: float) -> None:
        if not math.isfinite(loss) or step <= self.warm_up:  # every step was skipped: `engine.divergence` says it
            return
        if (limit := spike_limit(self._losses)) is not None and loss > limit:
            usual = median(self._losses[-RECENT:])
            advice = "a lower optim.lr or optim.max_grad_norm, or a longer optim.warmup_steps"
            self._flag("spike", f"step {step}: the loss has risen to {loss:.4g}, from about {usual:.4g}; "
                                f"if it does not come down: {advice}")  # fmt: skip
        self._losses.append(loss)
        if len(self._losses) % QUARTER == 0 and (levels := plateau(self._losses)) is not None:
            text = f"the loss has not fallen for {len(self._losses) // 4} intervals, {levels[0]:.4g} to {levels[1]:.4g}"
            self._flag("plateau", f"step {step}: {text}; compare with precision=bf16, or with another optim.lr")

    def _wait(self, step: int, wait: float) -> None:
        self._waits = self._waits + 1 if wait > WAIT else 0
        if self._waits >= WAITS:
            text = f"step {step}: {wait:.0%} of the time is spent waiting for data"
            more = ", ".join(f"{key}={max(2, 2 * number)} (now {number})" for key, number in self.workers.items())
            self._flag("wait", f"{text}; {more}")

    def _flag(self, kind: str, line: str) -> None:
        if self._rows - self._said.get(kind, -QUIET_ROWS) >= QUIET_ROWS:
            self._said[kind] = self._rows
            self.say(line)


def spike_limit(losses: Sequence[float]) -> float | None:
    """Return the loss above which the next one is a spike; None until `RECENT` are known.

    It is the median of the last `RECENT`, plus `SIGMAS` times their standard deviation, at least `LEAST` of the median.
    The standard deviation is that of a normal distribution of the same median absolute deviation (Rousseeuw and Croux
    1993, "Alternatives to the Median Absolute Deviation").
    """
    recent = losses[-RECENT:]
    if len(recent) < RECENT:
        return None
    middle = median(recent)
    deviation = NORMAL * median(abs(loss - middle) for loss in recent)
    return middle + max(SIGMAS * deviation, LEAST * abs(middle))


def plateau(losses: Sequence[float]) -> tuple[float, float] | None:
    """Return the median of the last quarter but one and of the last quarter, if that is not lower; else None.

    A quarter of a run is long enough that a loss which still falls has fallen, however slowly; and so at least
    `QUARTER` intervals.
    """
    window = len(losses) // 4
    if window < QUARTER:
        return None
    before, now = median(losses[-2 * window : -window]), median(losses[-window:])
    return (before, now) if now >= before else None
