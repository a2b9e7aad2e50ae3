"""Whether the runs of a table were made alike: of one code, one torch, one kind of GPU; and validated alike."""

from __future__ import annotations

from collections.abc import Iterable

from jobs import Job


def unlike(done: Iterable[Job]) -> list[str]:
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
    return lines


def _told(runs: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {' '.join(map(str, seeds))}" for name, seeds in runs.items())
