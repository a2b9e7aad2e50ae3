"""Compares conditions: losses at equal tokens and at equal time, gaps, and the time to the same loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from gpt2_fp8.reports import curves, intervals, spread
from gpt2_fp8.reports.comparison import SHARES, Comparison, Gap, Reached, Result
from gpt2_fp8.reports.conditions import Condition
from gpt2_fp8.reports.runs import Run
from gpt2_fp8.reports.spread import Spread

GRID = 60  # points of a curve
COMPLETED = "completed"
_MOST_POINTS = 1_000  # of a mean curve, on which the time to a loss is found


def compare(conditions: Sequence[Condition], base: Condition) -> Comparison:
    """Compare every condition with `base`."""
    ordered = [base, *(condition for condition in conditions if condition is not base)]
    compared = {condition.name: _whole(condition, base) for condition in ordered}
    every = [run for condition in ordered for run in compared[condition.name] if not _unlike(condition, base)]
    tokens, seconds = min(run.curve.end for run in every), min(run.curve.time for run in every)
    common = set.intersection(*({at for at, _ in run.curve.validations if at <= tokens} for run in every))
    found = Comparison(base, compared, [], tokens, seconds, max(common, default=None))
    found.results.extend(_result(condition, found) for condition in ordered)
    return found


def _whole(condition: Condition, base: Condition) -> tuple[Run, ...]:
    """Return the runs that came to their end; all of them if no run of the base did."""
    if not any(run.status == COMPLETED for run in base.runs):
        return condition.runs
    return tuple(run for run in condition.runs if run.status == COMPLETED)


def curve(result: Result, found: Comparison, by_time: bool) -> list[tuple[float, Spread]]:
    """Return the mean training loss at `GRID` points of tokens, or of seconds; empty if it is not comparable."""
    if result.not_comparable:
        return []
    end, runs = found.seconds if by_time else found.tokens, found.compared[result.condition.name]
    points = [end * (place + 1) / GRID for place in range(GRID)]
    loss_at = _in_time(found) if by_time else _in_tokens(found)
    losses = [(at, _losses(runs, _fixed(loss_at, at))) for at in points]
    return [(at, spread.spread(list(values.values()))) for at, values in losses if values]


def _result(condition: Condition, found: Comparison) -> Result:
    runs = found.compared[condition.name]
    why = _unlike(condition, found.base) or (None if runs else "no run of it came to its end")
    checked = None if why else found.validated_at
    shares = () if why else SHARES

    def gap(of: Callable[[Run], float | None]) -> Gap | None:
        return _gap(runs, found.compared[found.base.name], of)

    return Result(
        condition=condition,
        train=None if why else gap(lambda run: run.curve.mean(found.tokens, found.width)),
        validation=None if checked is None else gap(lambda run: run.curve.validation(checked)),
        at_tokens=[gap(_fixed(_in_tokens(found), share * found.tokens)) for share in shares],
        at_seconds=[gap(_fixed(_in_time(found), share * found.seconds)) for share in shares],
        to_train=None if why else _to_train(runs, found),
        to_validation=None if checked is None else _to_validation(runs, found, checked),
        speed=intervals.speed(condition.runs),
        gradients=intervals.gradients(condition.runs),
        not_comparable=why,
    )


def _unlike(condition: Condition, base: Condition) -> str | None:
    """Say why losses mean something else than the base's: another text, or other tokens."""
    keys = [key for key in condition.differs(base) if key.startswith("data.") or key == "model.vocab_size"]
    return f"another text or other tokens ({', '.join(keys[:3])})" if keys else None


def _in_tokens(found: Comparison) -> Callable[[Run, float], float | None]:
    return lambda run, at: run.curve.mean(at, found.width)


def _in_time(found: Comparison) -> Callable[[Run, float], float | None]:
    def loss_at(run: Run, seconds: float) -> float | None:
        tokens = run.curve.tokens_at(seconds)
        return None if tokens is None else run.curve.mean(tokens, found.width)

    return loss_at


def _losses(runs: Sequence[Run], of: Callable[[Run], float | None]) -> dict[str, float]:
    """Return the figure of each run that has it, by seed; runs of the same seed as their mean."""
    each: dict[str, list[float]] = {}
    for run in runs:
        if (value := of(run)) is not None:
            each.setdefault(run.seed, []).append(value)
    return {seed: statistics.fmean(values) for seed, values in each.items()}


def _gap(runs: Sequence[Run], base: Sequence[Run], of: Callable[[Run], float | None]) -> Gap | None:
    own, other = _losses(runs, of), _losses(base, of)
    if not own or not other:
        return None
    values, beside = list(own.values()), list(other.values())
    pairs = [seed for seed in own if seed in other]
    paired = spread.paired([own[s] for s in pairs], [other[s] for s in pairs]) if len(pairs) > 1 else None
    return Gap(spread.spread(values), spread.spread(beside), spread.welch(values, beside), paired)


def _to_train(runs: Sequence[Run], found: Comparison) -> Reached | None:
    width, end = found.width, min(run.curve.end for run in runs)
    final = _losses(found.compared[found.base.name], lambda run: run.curve.mean(found.tokens, width))
    ends = sorted({at for run in runs for at in run.curve.tokens if width <= at <= end})
    ends = [*ends[:: max(1, len(ends) // _MOST_POINTS)], end]
    singly = (
        sum(run.curve.first_at(statistics.fmean(final.values()), width) is not None for run in runs) if final else 0
    )
    return _reached(runs, final, ends, _in_tokens(found), singly)


def _to_validation(runs: Sequence[Run], found: Comparison, checked: float) -> Reached | None:
    final = _losses(found.compared[found.base.name], lambda run: run.curve.validation(checked))
    every = sorted(set.intersection(*({at for at, _ in run.curve.validations} for run in runs)))
    loss = statistics.fmean(final.values())
    singly = sum(curves.first_below(run.curve.validations, loss) is not None for run in runs)
    return _reached(runs, final, every, lambda run, at: run.curve.validation(at), singly)


def _reached(
    runs: Sequence[Run],
    final: dict[str, float],
    points: Sequence[float],
    loss_at: Callable[[Run, float], float | None],
    singly: int,
) -> Reached | None:
    """Find where the mean over seeds of `loss_at`, known at `points` of tokens, comes down to the mean of `final`."""
    if not final:
        return None
    loss = statistics.fmean(final.values())
    means = [(at, statistics.fmean(each.values())) for at in points if (each := _losses(runs, _fixed(loss_at, at)))]
    tokens = curves.first_below(means, loss)
    seconds = [] if tokens is None else [took for run in runs if (took := run.curve.seconds_at(tokens)) is not None]
    return Reached(loss, tokens, statistics.fmean(seconds) if seconds else None, singly)


def _fixed(of: Callable[[Run, float], float | None], at: float) -> Callable[[Run], float | None]:
    return lambda run: of(run, at)
