"""How a checkpoint's folder is named. Stdlib only."""

from __future__ import annotations

import re

_NAME = re.compile(r"step-([0-9]{8,15})")


def folder_name(step: int) -> str:
    """Return `step-00000100` for step 100."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint folder's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_aside(name: str) -> int | None:
    """Return the step of a folder that a killed writer moved aside, `.step-00000004.old`; None for any other name."""
    return step_of(name[1:-4]) if name.startswith(".") and name.endswith(".old") else None
