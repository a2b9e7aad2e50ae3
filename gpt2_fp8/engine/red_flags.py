"""Red flags of FP8: what a reading of the tensors' health says that a person should know. Plain Python, no tensors.

Each flag is one line for the log: what is wrong with which tensor, the figure, and what to do. A flag that several
tensors raise at once is one line, which names the worst. It is said again for the same tensor only after `QUIET`
readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpt2_fp8.config.schema import DelayedRecipe, StatelessRecipe
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.fp8.stored_scales import at_limit

SATURATED = 1e-3  # the share of a tensor from which it is said; healthy runs stay below a thirtieth of it
LAG = 2  # sampled readings in a row, of a scale that follows its tensor: once is a tensor that grows in its first steps
FLUSHED = 0.25  # the same; measured in docs/what-to-watch.md
JUMP = 6.0  # powers of two between two readings
SETTLED = 10  # readings with jumps that are not judged: scales find their place
UNSTEADY, IN_A_ROW = 2.0, 5  # powers of two in each of so many readings
QUIET = 50  # readings after which a flag of the same tensor is said again
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
            found = self._of_scale(health)
            if found is not None:
                yield found
                continue  # its shares follow from that
            yield from self._of_shares(health)
            yield from self._of_jumps(health, settled)

    def _of_scale(self, health: Health) -> Found | None:
        tensor = health.tensor
        keep = f"precision.keep_bf16='[{tensor.layer}]' keeps the layer in bf16"
        if not math.isfinite(health.amax):
            return Found(
                "amax", health, math.inf, f"the amax of {tensor} is {health.amax}", f"a lower optim.lr; {keep}"
            )
        if health.amax == 0:
            text = f"the amax of {tensor} is 0: every value of it is"
            return Found(
                "zero", health, 0, text, "nothing is learnt there; a lower optim.lr, from an earlier checkpoint"
            )
        if at_limit(health.scale):
            text = f"the scale of {tensor} is {health.scale:.3g}, at an amax of {health.amax:.3g}"
            return Found("scale", health, math.inf, text, f"a lower optim.lr; {keep}")
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
        keep = f"precision.keep_bf16='[{health.tensor.layer}]'"
        if isinstance(self.recipe, DelayedRecipe):
            lacking = math.ceil(-health.headroom) if math.isfinite(health.headroom) else 1
            return (
                f"recipe=delayed recipe.margin={self.recipe.margin + max(1, lacking)} leaves more headroom, or {keep}"
            )
        return f"{keep} keeps the layer in bf16"

    def _less_headroom(self, health: Health) -> str:
        keep = f"precision.keep_bf16='[{health.tensor.layer}]'"
        if isinstance(self.recipe, DelayedRecipe) and self.recipe.margin > 0:
            return f"recipe=delayed recipe.margin=0 leaves less headroom, or {keep}"
        if health.tensor.kind == "gradient" and health.tensor.format == "e4m3":
            return f"precision=fp8_hybrid has gradients of more range, or {keep}"
        return f"{keep} keeps the layer in bf16, or recipe=block"
