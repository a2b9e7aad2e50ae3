"""Compares conditions: losses at equal tokens and at equal time, gaps, and the time to the same loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from gpt2_fp8.reports import curves, intervals, spread
from gpt2_fp8.reports.comparison import COMPLETED, CUT, LEVELS, SHARES, WINDOW, Comparison, Gap, Reached, Result
from gpt2_fp8.reports.conditions import Condition
from gpt2_fp8.reports.runs import Run
from gpt2_fp8.reports.spread import Spread

GRID = 60  # points of a curve
_MOST_POINTS = 1_000  # of a mean curve, on which the time to a loss is found


def compare(conditions: Sequence[Condition], base: Condition) -> Comparison:
    """Compare every condition with `base`."""
    ordered = [base, *(condition for condition in conditions if condition is not base)]
    compared = _counted(ordered, base)
    every = [run for condition in ordered for run in compared[condition.name] if not _unlike(condition, base)]
    tokens, seconds = min(run.curve.end for run in every), min(run.curve.time for run in every)
    common = set.intersection(*({at for at, _ in run.curve.validations if at <= tokens} for run in every))
    width = min(tokens, max(WINDOW * tokens, *(run.curve.interval for run in every)))
    begin = max(run.curve.seconds_at(width) or 0.0 for run in every)
    found = Comparison(base, compared, [], tokens, seconds, max(common, default=None), width, begin)
    found.results.extend(_result(condition, found) for condition in ordered)
    return found


def _counted(conditions: Sequence[Condition], base: Condition) -> dict[str, tuple[Run, ...]]:
    """Return the runs whose losses count, by the name of their condition: those that came to their end.

    If no run of the base did, all of every condition count. If fewer than two conditions came to an end, runs of the
    others count that may go on (`CUT`).
    """
    if not any(run.status == COMPLETED for run in base.runs):
        return {condition.name: condition.runs for condition in conditions}
    ended = {c.name: tuple(run for run in c.runs if run.status == COMPLETED) for c in conditions}
    if sum(map(bool, ended.values())) > 1:
        return ended
    return {c.name: ended[c.name] or tuple(run for run in c.runs if run.status in CUT) for c in conditions}


def curve(result: Result, found: Comparison, by_time: bool) -> list[tuple[float, Spread]]:
    """Return the mean training loss at up to `GRID` points of tokens, or of seconds; empty if it is not comparable."""
    if result.not_comparable:
        return []
    start, end = (found.begin, found.seconds) if by_time else (found.width, found.tokens)
    runs, between = found.compared[result.condition.name], max(0.0, end - start) / (GRID - 1)
    points = [*(start + between * place for place in range(GRID - 1) if between), end]
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
        to_train=[] if why or condition is found.base else list(_to_train(runs, found)),
        to_validation=None if checked is None or condition is found.base else _to_validation(runs, found, checked),
        speed=intervals.speed(condition.runs),
        gradients=intervals.gradients(condition.runs),
        not_comparable=why,
    )


def _unlike(condition: Condition, base: Condition) -> str | None:
    """Say why losses mean something else than the base's: another text, or other tokens."""
    keys = [key for key in condition.differs(base) if key.startswith("data.") or key == "model.vocab_size"]
    return f"another text or other tokens ({', '.join(keys[:3])})" if keys else None


def _in_tokens(found: Comparison) -> Callable[[Run, float], float | None]:
    return lambda run, at: None if at < found.width else run.curve.mean(at, found.width)


def _in_time(found: Comparison) -> Callable[[Run, float], float | None]:
    def loss_at(run: Run, seconds: float) -> float | None:
        tokens = None if seconds < found.begin else run.curve.tokens_at(seconds)
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


def _to_train(runs: Sequence[Run], found: Comparison) -> Iterator[Reached]:
    base, levels = found.compared[found.base.name], [share * found.tokens for share in LEVELS]
    own, other = (_course(each, _ends(each, found, levels), _in_tokens(found)) for each in (runs, base))
    for share, at in zip(LEVELS, levels, strict=True):
        if reached := _reached(runs, base, own, other, share, at):
            yield reached


def _to_validation(runs: Sequence[Run], found: Comparison, checked: float) -> Reached | None:
    base = found.compared[found.base.name]
    own, other = (
        _course(
            each,
            sorted(set.intersection(*({at for at, _ in run.curve.validations} for run in each))),
            lambda run, at: run.curve.validation(at),
        )
        for each in (runs, base)
    )
    return _reached(runs, base, own, other, 1.0, checked)


def _ends(runs: Sequence[Run], found: Comparison, levels: Sequence[float]) -> list[float]:
    """Return the tokens at which the mean of `runs` is looked at: the ends of their intervals, and `levels`."""
    end = min(run.curve.end for run in runs)
    ends = sorted({at for run in runs for at in run.curve.tokens if found.width <= at <= end})
    return sorted({*ends[:: max(1, len(ends) // _MOST_POINTS)], *levels})


def _course(
    runs: Sequence[Run], points: Sequence[float], loss_at: Callable[[Run, float], float | None]
) -> list[tuple[float, float]]:
    """Return the mean over seeds of `loss_at` where every run has one."""
    each = [(at, [loss_at(run, at) for run in runs]) for at in points]
    whole = [at for at, losses in each if None not in losses]
    return [(at, statistics.fmean(_losses(runs, _fixed(loss_at, at)).values())) for at in whole]


def _reached(
    runs: Sequence[Run],
    base: Sequence[Run],
    own: Sequence[tuple[float, float]],
    other: Sequence[tuple[float, float]],
    share: float,
    at: float,
) -> Reached | None:
    """Find where the courses of both come down to the higher of their losses at `at` tokens."""
    losses = dict(own).get(at), dict(other).get(at)
    if losses[0] is None or losses[1] is None:
        return None
    level = max(losses[0], losses[1])
    mine, beside = curves.first_below(own, level), curves.first_below(other, level)
    if mine is None or beside is None:
        return None
    return Reached(share, level, mine, _seconds(runs, mine), beside, _seconds(base, beside))


def _seconds(runs: Sequence[Run], tokens: float) -> float:
    """Return the mean training time of runs that all have so many tokens."""
    return statistics.fmean(run.curve.seconds_at(tokens) or 0.0 for run in runs)


def _fixed(of: Callable[[Run, float], float | None], at: float) -> Callable[[Run], float | None]:
    return lambda run: of(run, at)
