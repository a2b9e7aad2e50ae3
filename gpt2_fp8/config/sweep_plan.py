"""`sweep.json`: the words of each job that a sweep was to run, written before the first of them begins.

It is how a table tells the jobs that did not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "sweep.json"


def write(folder: Path, jobs: Sequence[Sequence[str]] | None) -> None:
    """Replace the plan in `folder`, which may not exist yet. `jobs`: None if nobody knows them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{NAME}.tmp"
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "w") as file:
        json.dump({"jobs": jobs}, file, indent=1)
    os.replace(temporary, folder / NAME)


def jobs_of(plan: Any) -> list[list[str]]:
    """Return the jobs in a plan that was read, which may be a stranger's: what has not their form is left out."""
    jobs = plan.get("jobs") if isinstance(plan, dict) else None
    return [job for job in jobs if is_words(job)] if isinstance(jobs, list) else []


def is_words(value: object) -> bool:
    """Return whether a value that was read is a list of words."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)
