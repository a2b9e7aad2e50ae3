"""Earlier measurements on this machine for `precision=auto`: one JSON file in the user's cache folder.

An entry belongs to its key: the machine, the GPU, the versions, and every setting on which speed or numbers depend. It
keeps the figures and not the decision, so that the decision can follow other settings.

Nothing here can end a run. A file that cannot be read is replaced; one that cannot be written costs the next run its
time. Several processes may store at once. If the filesystem has no locks, one may undo what another stored at the same
moment.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.precision.choose import Figures

log = logging.getLogger(__name__)

FORMAT = "gpt2_fp8 measurements 1"
Measured = tuple[str, list[Figures]]  # the day, as YYYY-MM-DD, and what was measured


def place() -> Path:
    """Return the path of the file: `gpt2_fp8/auto.json` in $XDG_CACHE_HOME, or in ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = given if given.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return folder / "gpt2_fp8" / "auto.json"


def load(key: dict[str, Any]) -> Measured | None:
    """Return what was measured under `key`; None if there is nothing."""
    entry = _entries().get(_hash(key))
    if entry is None:
        return None
    try:
        assert entry["key"] == key
        return str(entry["measured_on"]), [_figures(row) for row in entry["figures"]]
    except (AssertionError, KeyError, TypeError, ValueError):
        log.warning("%s: the entry for this model is damaged; measuring again", place())
        return None


def store(key: dict[str, Any], measured_on: str, figures: Sequence[Figures]) -> None:
    """Store what was measured under `key`; other entries stay."""
    entry = {"key": key, "measured_on": measured_on, "figures": [_row(f) for f in figures]}
    try:
        place().parent.mkdir(parents=True, exist_ok=True)
        with _alone():
            _replace({"format": FORMAT, "entries": {**_entries(), _hash(key): entry}})
    except (OSError, ValueError) as error:
        log.warning("%s cannot be written, so the next run measures again: %s", place(), error)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock beside the file. The lock ends with its process.

    Raises OSError if the lock's file cannot be opened. A filesystem without locks is not locked.
    """
    lock = durable.open_regular(place().with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _replace(content: dict[str, Any]) -> None:
    """Replace the file atomically, through a file that no other process writes.

    Raises OSError and then changes nothing.
    """
    with tempfile.TemporaryDirectory(prefix=".auto-", dir=place().parent) as own:
        durable.write_json(Path(own) / place().name, content)
        os.replace(Path(own) / place().name, place())
    durable.fsync(place().parent)


def _entries() -> dict[str, Any]:
    """Return the file's entries; {} if the file is missing, damaged, or another program's."""
    try:
        content = json.loads(place().read_text(encoding="utf-8"))
        if content["format"] == FORMAT and isinstance(content["entries"], dict):
            return content["entries"]
        reason = f"its format is {content['format']!r}"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    log.warning("%s is ignored and will be replaced: %s", place(), reason)
    return {}


def _hash(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _row(figures: Figures) -> dict[str, Any]:
    """Convert figures for JSON, which has no numbers that are not finite: they become null."""
    row = asdict(figures)
    for name in ("losses", "grad_norms"):
        row[name] = [value if math.isfinite(value) else None for value in row[name]]
    return row


def _figures(row: dict[str, Any]) -> Figures:
    """Convert a row back. Raises TypeError, KeyError or ValueError for a row that `_row` cannot have made."""
    numbers = {name: None if row[name] is None else float(row[name]) for name in _NUMBERS}
    lists = {
        name: [math.nan if value is None else float(value) for value in row[name]] for name in ("losses", "grad_norms")
    }
    return Figures(**{**row, **numbers, **lists})


_NUMBERS = ("tokens_per_second", "fastest", "peak_memory_gb")
