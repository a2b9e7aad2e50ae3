"""Whether the runs of a table were made alike: of one code, one torch, on one kind of GPU."""

from __future__ import annotations

from collections.abc import Iterable

from jobs import Job

MADE_BY = ("code", "torch", "device")  # names of what is compared


def unlike(jobs: Iterable[Job]) -> list[str]:
    """Return a line for each thing in which runs that are done differ, with the runs that had each of them.

    A run that was continued counts as its last process. What a summary of an earlier version does not have is
    "unknown".
    """
    done = [(job, job.made_by) for job in jobs if job.done]
    lines = []
    for what in MADE_BY:
        runs: dict[str, dict[str, list[int]]] = {}
        for job, made_by in done:
            runs.setdefault(made_by.get(what) or "unknown", {}).setdefault(job.name, []).append(job.seed)
        if len(runs) > 1:
            told = "; ".join(f"{value}: {_told(found)}" for value, found in runs.items())
            lines.append(f"not of one {what}: {told}")
    return lines


def _told(runs: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {' '.join(map(str, seeds))}" for name, seeds in runs.items())
