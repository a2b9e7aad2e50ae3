"""Whether the runs of a table were made alike: of one code, one torch, one kind of GPU; and validated alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jobs import Job


def unlike(done: Collection[Job]) -> list[str]:
    """Return a line for each thing in which runs that are done differ, with the runs that had each of them.

    A run that was continued counts as its last process. What a summary of an earlier version does not have is
    "unknown".
    """
    by_what: dict[str, dict[str, dict[str, list[int]]]] = {}
    for job in done:
        for what, value in job.made_by.items():
            runs = by_what.setdefault(what, {}).setdefault(value or "unknown", {})
            runs.setdefault(job.name, []).append(job.seed)
    lines = []
    for what, runs_of in by_what.items():
        if len(runs_of) > 1:
            told = "; ".join(f"{value}: {_told(found)}" for value, found in runs_of.items())
            lines.append(f"not of one {what}: {told}")
    return lines + _validated(done)


def _validated(done: Iterable[Job]) -> list[str]:
    """Return a line if some runs in FP8 were validated in FP8, and others in bf16, though none was asked to.

    The default of `precision.evaluation` was FP8 once.
    """
    runs_of: dict[str, dict[str, list[int]]] = {}
    for job in done:
        if (found := job.validated_in) is not None:
            runs_of.setdefault(found, {}).setdefault(job.name, []).append(job.seed)
    told = "; ".join(f"{found}: {_told(runs)}" for found, runs in runs_of.items())
    return [f"not of one validation: {told}"] if len(runs_of) > 1 else []


def _told(runs: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {' '.join(map(str, seeds))}" for name, seeds in runs.items())
