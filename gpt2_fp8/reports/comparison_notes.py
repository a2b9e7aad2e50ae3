"""What a reader of a comparison must know before believing a figure of it, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpt2_fp8.reports.comparison import CUT, Comparison
from gpt2_fp8.reports.conditions import Condition

_MOST_KEYS = 4


def of(found: Comparison, left_out: Sequence[str]) -> list[str]:
    """Return the notes: on the whole, on each condition, and on what was left out."""
    return [*_on_all(found), *(note for c in _conditions(found) for note in _on(c, found)),
            *(f"Left out: {line}" for line in left_out)]  # fmt: skip


def _conditions(found: Comparison) -> list[Condition]:
    return [result.condition for result in found.results]


def _on_all(found: Comparison) -> Iterator[str]:
    conditions = _conditions(found)
    runs = [run for condition in conditions for run in condition.runs]
    if len(conditions) == 1:
        yield "All runs have the same settings but for the seed: this shows the spread of seeds, and compares nothing."
    if len({run.device for run in runs}) > 1:
        devices = sorted({str(run.device) for run in runs})
        yield f"The runs were on different devices ({', '.join(devices[:_MOST_KEYS])}): speeds compare those, too."
    if found.base.fp8 and len(conditions) > 1:
        yield f"The base, {found.base.name}, has computed in FP8 itself."
    lengths = {run.curve.end for runs in found.compared.values() for run in runs}
    if len(lengths) > 1:
        yield (
            f"The runs have {min(lengths):,.0f} to {max(lengths):,.0f} tokens: losses are compared at the "
            "fewest, where a longer run may still have a higher learning rate."
        )
    if len({run.settings.get("trainer.log_every_n_steps") for run in runs}) > 1:
        yield "The runs logged at different intervals: means are over the same tokens all the same."
    if found.validated_at is None:
        yield "The runs have no validation at the same tokens: training losses alone are compared."


def _on(condition: Condition, found: Comparison) -> Iterator[str]:
    name, runs = condition.name, condition.runs
    for run in runs:
        yield from (f"{run.name}: {note}" for note in run.notes)
    fell = [run for run in runs if run.reason and run.ran != run.asked]
    if fell:
        yield f"{name}: {fell[0].asked} was asked for, and {fell[0].ran} ran: {fell[0].reason}."
    seeds = {run.seed for run in runs}
    if len(seeds) == 1:
        yield f"{name}: a single seed, so its differences have no spread, and a difference may be the seed's."
    if len(seeds) < len(runs):
        yield f"{name}: {len(runs)} runs of {len(seeds)} seeds; those of a seed count as one, by their mean."
    if condition is not found.base:
        yield from _beside(condition, seeds, found)
    ended = len(found.compared[name])
    if ended < len(runs):
        others = sorted({run.status for run in runs if run not in found.compared[name]})
        yield f"{name}: {len(runs) - ended} of {len(runs)} runs are not in the losses ({', '.join(others)})."
    if not ended and any(run.status in CUT for run in runs):
        yield f"{name}: to see its losses so far, compare its folders with the base's alone."
    if resumed := sum(run.curve.resumes for run in runs):
        yield (
            f"{name}: continued {resumed} times. The first step after that has no time in the log, and counts as none."
        )


def _beside(condition: Condition, seeds: set[str], found: Comparison) -> Iterator[str]:
    keys = condition.differs(found.base)
    if keys:
        more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
        yield f"{condition.name}: differs from the base in {', '.join(keys[:_MOST_KEYS])}{more}."
    if any(key.startswith("data.") for key in keys):
        yield f"{condition.name}: losses of another text or other tokens are not compared."
    if seeds != {run.seed for run in found.base.runs}:
        yield f"{condition.name}: its seeds are not the base's, so not all of them can be compared in pairs."
