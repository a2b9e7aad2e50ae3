"""Compares conditions with a base: losses at equal tokens, time to equal loss, throughput, memory, a verdict on FP8.

Figures are rows of plain values: nats a token, seconds, GiB, shares of 1. `relative` is to the base's mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpt2_fp8.reports.runs import COMPLETED, Array, Condition, Run, first_below

WINDOW = 0.05  # of the tokens that all runs have: the least window of a mean training loss
WITHIN = 0.05  # of the base's loss: FP8 is as good if the confidence interval of the difference is within this
GOOD, WORSE, UNDECIDED = "as good", "worse", "undecided"
_MOST_POINTS = 1_000  # of a mean curve, on which the time to a loss is found
Row = dict[str, Any]
Seeds = Sequence[Sequence[str]]  # of a condition and of the base
CONFIDENCE = 0.95
_ANGLES = 400_001  # points of an integral


@dataclass(frozen=True, eq=False)
class Side:
    """A condition, its runs whose losses count, and why they are not compared, if so."""

    condition: Condition
    runs: tuple[Run, ...]
    why_not: str | None

    def by_seed(self, of: Callable[[Run], Array]) -> dict[str, Array]:
        """Return what `of` says of each seed: the mean of its runs."""
        seeds = dict.fromkeys(run.seed for run in self.runs)
        return {seed: np.mean([of(run) for run in self.runs if run.seed == seed], axis=0) for seed in seeds}


@dataclass(frozen=True)
class Comparison:
    """What is compared."""

    sides: list[Side]  # by the loss at the end, best first
    base: Side  # what the others are compared with, one of them
    tokens: float  # that all runs have
    width: float  # tokens of the window of a mean training loss: no run logs a wider interval
    validated: Array  # tokens at which all runs have validated
    price: float | None = None  # of a GPU for an hour


def compare(conditions: Sequence[Condition], base: Condition, price: float | None = None) -> Comparison:
    """Compare every condition with `base`. Runs that did not complete count only if none of the base's did.

    `price`: of a GPU for an hour, in any currency.
    """
    ordered = [base, *(condition for condition in conditions if condition is not base)]
    counted = [tuple(run for run in condition.runs if run.status == COMPLETED) for condition in ordered]
    counted = counted if counted[0] else [condition.runs for condition in ordered]
    sides = []
    for condition, runs in zip(ordered, counted, strict=True):
        text = [key for key in condition.differs(base) if key.startswith("data.") or key == "model.vocab_size"]
        why_not = f"another text or other tokens ({', '.join(text[:4])})" if text else "no run of it completed"
        sides.append(Side(condition, runs, why_not if text or not runs else None))
    every = [run for side in sides if side.why_not is None for run in side.runs]
    tokens = min(float(run.curve.tokens[-1]) for run in every)
    width = min(tokens, max(WINDOW * tokens, *(run.curve.interval for run in every)))
    checked = set.intersection(*({float(at) for at in run.curve.validations[0] if at <= tokens} for run in every))
    found = Comparison(sides, sides[0], tokens, width, np.array(sorted(checked)), price)
    sides.sort(key=lambda side: np.nan_to_num(next(losses(side, found)).get("mean", math.nan), nan=math.inf))
    return found


def figures(found: Comparison, left_out: Sequence[str]) -> dict[str, Any]:
    """Return every figure, and what to know of them. `left_out`: a line for each run that could not be read."""
    sides = found.sides
    return {
        "result": describe_result(found),
        "tokens": found.tokens,
        "runs": [describe_runs(side) for side in sides],
        "verdict": [verdict(side, found) for side in sides if side.condition.fp8 and side is not found.base],
        "losses": [row for side in sides for row in losses(side, found)],
        "equal_loss": [row for side in sides for row in equal_loss(side, found)],
        "throughput": [throughput(side, found) for side in sides],
        "notes": [*notes(found), *(f"Left out: {line}" for line in left_out)],
    }


def describe_result(found: Comparison) -> str:
    """Return what came out, in one or two sentences: whose loss is the lowest, and whether FP8 is as good."""
    (best, *others), base = [side for side in found.sides if not side.why_not], found.base
    row = next(losses(best, found))
    if not others:
        return f"Only {best.condition.name} has a loss that counts: {row['loss']} {row['mean']:.4f}."
    told = f"{best.condition.name} has the lowest {row['loss']} loss, {row['mean']:.4f}"
    if best is not base:
        told += f", {abs(row['relative']):.2%} below {base.condition.name}"
    else:
        row = next(losses(others[0], found))
        told += f"; the next, {others[0].condition.name}, is {row['relative']:.2%} above it"
    judged = next((side for side in found.sides if side.condition.fp8 and side is not base), None)
    if judged is None:
        return f"{told} ({_describe_interval(row)})."
    row, times = verdict(judged, found), throughput(judged, found)["times_base"]
    fast = f"; {times:.2f} times as fast" if times else ""
    return f"{told}. {judged.condition.name} against {base.condition.name}: {row['answer']} ({row['why']}){fast}."


def losses(side: Side, found: Comparison) -> Iterator[Row]:
    """Yield validation and training loss at the end. Intervals are Welch's; pairs are of equal seeds."""
    name = {"condition": side.condition.name}
    if side.why_not:
        yield name | {"loss": f"not compared: {side.why_not}"}
        return
    of: dict[str, Callable[[Run], Array]] = {}
    if found.validated.size:
        of["validation"] = lambda run: run.curve.validation(found.validated[-1])
    of["training"] = lambda run: run.curve.mean(np.asarray(found.tokens), found.width)
    for kind, loss in of.items():
        own, base = ({seed: float(value) for seed, value in each.by_seed(loss).items()} for each in (side, found.base))
        values, others = list(own.values()), list(base.values())
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        row = name | {"loss": kind, "mean": float(np.mean(values)), "deviation": deviation}
        if side is not found.base:
            difference, scale = welch(values, others), float(np.mean(others))
            bounds = {"relative_low": difference.low, "relative_high": difference.high}
            row |= {"above_base": difference.value, "relative": difference.value / scale}
            row |= {key: None if bound is None else bound / scale for key, bound in bounds.items()}
            if len(pairs := [seed for seed in own if seed in base]) > 1:
                differences = paired_difference([own[seed] for seed in pairs], [base[seed] for seed in pairs])
                row |= {"paired": differences.value, "paired_error": differences.error}
        yield row


def equal_loss(side: Side, found: Comparison) -> Iterator[Row]:
    """Yield when the mean curves first came down to the higher of the two losses at the end.

    On the validations, or, with fewer than two, on the training loss. Errors are the jackknife's over seeds. Energy and
    cost are those of one GPU for that time.
    """
    if side.why_not or side is found.base:
        return
    both, kind, at, loss = (side, found.base), "validation", found.validated, lambda run: run.curve.validation(at)
    if at.size < 2:
        ends = np.unique(np.concatenate([run.curve.tokens for each in both for run in each.runs]))
        ends = ends[(ends >= found.width) & (ends < found.tokens)]
        at = np.append(ends[:: max(1, ends.size // _MOST_POINTS)], found.tokens)
        kind, loss = "training", lambda run: run.curve.mean(at, found.width)
    curve, time = ([each.by_seed(of) for each in both] for of in (loss, lambda run: run.curve.seconds_at(at)))

    def crossings(kept: Seeds) -> Array:
        """Return tokens, seconds and the loss, each of both sides, from the means over `kept` seeds of each."""
        means = [np.mean([c[seed] for seed in seeds], axis=0) for c, seeds in zip(curve, kept, strict=True)]
        times = [np.mean([t[seed] for seed in seeds], axis=0) for t, seeds in zip(time, kept, strict=True)]
        level = max(mean[-1] for mean in means)
        where = [first_below(at, mean, level) for mean in means]
        return np.array([where, [np.interp(place, at, t) for place, t in zip(where, times, strict=True)], [level] * 2])

    seeds = [list(each) for each in curve]
    (tokens, base_tokens), (seconds, base_seconds), (level, _) = crossings(seeds).tolist()
    if min(base_tokens, base_seconds) > 0 and math.isfinite(level):
        tokens_error, seconds_error = _jackknife(seeds, crossings)
        yield {
            "condition": side.condition.name, "loss": kind, "level": level,
            "tokens": tokens, "base_tokens": base_tokens, "tokens_ratio": tokens / base_tokens,
            "tokens_error": tokens_error, "seconds": seconds, "base_seconds": base_seconds,
            "seconds_ratio": seconds / base_seconds, "seconds_error": seconds_error,
            **_spent("", seconds, side, found.price), **_spent("base_", base_seconds, found.base, found.price),
        }  # fmt: skip


def _spent(prefix: str, seconds: float, side: Side, price: float | None) -> Row:
    watts = [run.watts for run in side.runs if run.watts is not None]
    joules = {f"{prefix}kilojoules": seconds * float(np.mean(watts)) / 1000} if watts else {}
    return joules if price is None else joules | {f"{prefix}cost": seconds / 3600 * price}


def throughput(side: Side, found: Comparison) -> Row:
    """Return throughput, the mean of the runs' medians, and the peak memory."""
    (rate, memory), (base_rate, base_memory) = _speed(side.condition), _speed(found.base.condition)
    times = rate / base_rate if rate and base_rate else None
    share = memory / base_memory if memory and base_memory else None
    row = {"condition": side.condition.name, "tokens_per_second": rate, "times_base": times, "memory_gb": memory}
    return row | {
        "memory_of_base": share,
        "seconds": float(np.mean([r.curve.seconds[-1] for r in side.condition.runs])),
    }


def verdict(side: Side, found: Comparison) -> Row:
    """Judge a condition that has computed in FP8 by the confidence interval of its loss."""

    def judge(answer: str, why: str) -> Row:
        return {"condition": side.condition.name, "answer": answer, "why": why}

    keys, row = side.condition.differs(found.base.condition), next(losses(side, found))
    if side.why_not or found.base.condition.fp8 or keys:
        other = f"other settings differ too: {', '.join(keys[:4])}" if keys else "the base has computed in FP8 too"
        return judge(UNDECIDED, side.why_not or other)
    if diverged := sum(run.status == "diverged" for run in side.condition.runs):
        return judge(WORSE, f"{diverged} of {len(side.condition.runs)} runs diverged")
    low, high = row["relative_low"], row["relative_high"]
    told = f"{row['loss']} loss {row['relative']:+.2%}, {_describe_interval(row)}"
    if low is None:
        return judge(UNDECIDED, told)
    answer = GOOD if max(-low, high) <= WITHIN else UNDECIDED if low <= WITHIN else WORSE  # also a loss that is NaN
    return judge(answer, f"{told}, limit {WITHIN:.0%}")


def _describe_interval(row: Row) -> str:
    if row["relative_low"] is None:
        return "a single seed has no confidence interval: seed=1,2,3"
    return f"95 % interval {row['relative_low']:+.2%} to {row['relative_high']:+.2%}"


def describe_runs(side: Side) -> Row:
    """Return what the runs of a condition are, and how they have ended."""
    runs = side.condition.runs
    return {
        "condition": side.condition.name,
        "seeds": ", ".join(dict.fromkeys(str(run.settings.get("seed")) for run in runs)),
        "layers": runs[0].layers,
        "steps": ", ".join(f"{steps:,}" for steps in sorted({run.steps for run in runs})),
        "status": ", ".join(dict.fromkeys(run.status for run in runs)),
        "events": ", ".join(f"{times} {what}" for run in runs for what, times in run.trouble.items()),
    }


def notes(found: Comparison) -> Iterator[str]:
    """Yield what a reader must know before believing a figure."""
    for side in found.sides:
        name, runs = side.condition.name, side.condition.runs
        if runs[0].reason and runs[0].ran != runs[0].asked:
            yield f"{name}: {runs[0].asked} was asked for, and {runs[0].ran} ran: {runs[0].reason}."
        if keys := side.condition.differs(found.base.condition):
            yield f"{name}: differs from the base in {', '.join(keys[:8])}."
        if others := [run for run in runs if run not in side.runs]:
            ended = ", ".join(sorted({run.status for run in others}))
            yield f"{name}: {len(others)} of {len(runs)} runs are not in the losses ({ended})."
        yield from (f"{run.name}: metrics.csv is damaged ({run.damage})." for run in runs if run.damage)


def mean_curve(side: Side, found: Comparison, points: int) -> tuple[Array, Array, Array]:
    """Return tokens, the mean training loss there, and its standard deviation between runs."""
    at = np.linspace(found.width, found.tokens, points)
    each = np.array([run.curve.mean(at, found.width) for run in side.runs])
    return at, each.mean(axis=0), each.std(axis=0, ddof=1) if len(each) > 1 else np.zeros(points)


def _speed(condition: Condition) -> tuple[float | None, float | None]:
    rates = [np.median(run.curve.rates) for run in condition.runs if run.curve.rates.size]
    memory = [run.memory_gb for run in condition.runs if run.memory_gb is not None]
    return float(np.mean(rates)) if rates else None, float(np.mean(memory)) if memory else None


def _jackknife(kept: list[list[str]], of: Callable[[Seeds], Array]) -> tuple[float | None, float | None]:
    """Return the standard errors of the first two ratios by leaving out seed after seed, in pairs for equal seeds."""
    own, base = kept
    if min(len(own), len(base)) < 2:
        return None, None
    pairs = set(own) == set(base)
    without = [[[[s for s in own if s != seed], [s for s in base if s != seed or not pairs]] for seed in own]]
    without += [] if pairs else [[[own, [s for s in base if s != seed]] for seed in base]]
    ratios = [np.array([each[:2, 0] / each[:2, 1] for each in map(of, group)]) for group in without]
    tokens, seconds = np.sqrt(sum((len(each) - 1) * each.var(axis=0) for each in ratios)).tolist()
    return tokens, seconds


# ---- statistics over seeds -------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A difference of means. What is uncertain is None if a side has a single run."""

    value: float
    error: float | None = None  # standard error
    low: float | None = None  # the two-sided confidence interval
    high: float | None = None
    above: float | None = None  # the one-sided upper bound


def welch(values: Sequence[float], base: Sequence[float]) -> Difference:
    """Return the mean of `values` minus that of `base`; each side has its own variance (Welch, Biometrika 34, 1947)."""
    value = float(np.mean(values) - np.mean(base))
    if min(len(values), len(base)) < 2:
        return Difference(value)
    parts = [(float(np.var(side, ddof=1)) / len(side), len(side) - 1) for side in (values, base)]
    square = sum(part for part, _ in parts)
    freedom = square**2 / sum(part**2 / count for part, count in parts) if square else 1.0
    return _add_bounds(value, math.sqrt(square), freedom)


def paired_difference(values: Sequence[float], base: Sequence[float]) -> Difference:
    """Return the mean difference of values that belong together pair by pair: the same seed on both sides."""
    each = [one - other for one, other in zip(values, base, strict=True)]
    if len(each) < 2:
        return Difference(float(np.mean(each)))
    return _add_bounds(float(np.mean(each)), float(np.std(each, ddof=1)) / math.sqrt(len(each)), len(each) - 1.0)


def _add_bounds(value: float, error: float, freedom: float) -> Difference:
    two, one = (error * student(p, freedom) for p in ((1 + CONFIDENCE) / 2, CONFIDENCE))
    return Difference(value, error, value - two, value + two, value + one)


@functools.cache
def student(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t: `student(0.95, 5)` is 2.015. `probability` is in (0, 1), `freedom` >= 1.

    It is integrated here: scipy is a large package for one function. With t = sqrt(n) tan(a), the density for n degrees
    of freedom is proportional to cos(a)^(n - 1) on -pi/2 < a < pi/2.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, _ANGLES)
    heights = np.cos(angles).clip(0) ** (freedom - 1)
    sums = np.concatenate([[0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(probability, sums / sums[-1], angles)))
