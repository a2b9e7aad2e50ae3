"""The runs below the folders that are to be compared, each once, and why others are left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpt2_fp8.reports import runs, sweep_jobs
from gpt2_fp8.reports.runs import Run

MOST = 1_000  # runs that are read


class Found(NamedTuple):
    """The runs that can be compared, and a line for each folder that cannot."""

    runs: list[Run]
    left_out: list[str]


def below(folders: Sequence[Path], progress: Callable[[int, int], None]) -> Found:
    """Read every run in `folders`: a run's own folder, or one that holds several, such as a sweep's.

    `progress` is called before each run with the number of runs read, and of all. Raises OSError if one of `folders`
    cannot be listed.
    """
    paths = list(dict.fromkeys(path.resolve() for folder in folders for path in _paths(folder)))
    top = Path(os.path.commonpath(paths)) if len(paths) > 1 else None
    found = Found([], [])
    if len(paths) > MOST:
        found.left_out.append(f"{len(paths) - MOST:,} more runs: at most {MOST:,} are compared")
        del paths[MOST:]
    for place, path in enumerate(paths):
        progress(place, len(paths))
        name = str(path.relative_to(top)) if top else path.name
        try:
            found.runs.append(runs.read(path, name))
        except ValueError as error:
            found.left_out.append(f"{name}: {error}")
    return found


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's own."""
    return any(os.path.lexists(folder / name) for name in (sweep_jobs.SUMMARY, sweep_jobs.METRICS))


def _paths(folder: Path) -> Sequence[Path]:
    return [folder] if is_run(folder) else sweep_jobs.folders(folder)
