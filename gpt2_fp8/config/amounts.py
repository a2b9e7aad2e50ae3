"""Amounts in words for a person: durations, and paths as one would type them."""

from __future__ import annotations

from pathlib import Path

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration(seconds: float) -> str:
    """Return a time in its two largest units: `0.4 s`, `23 s`, `1 min 23 s`, `2 h 31 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    minutes = round(seconds / _MINUTE)
    if minutes < _DAY // _MINUTE:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / _HOUR)
    return f"{hours // 24:,} d {hours % 24} h"


def counted(number: int, what: str) -> str:
    """Return a number with what it counts, an English noun that takes an s: `1 step`, `19,073 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def as_typed(path: Path, here: Path | None = None) -> Path:
    """Return `path` relative to the folder `here` (None: the current one) if it lies in it, else as it is."""
    here = here or Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
