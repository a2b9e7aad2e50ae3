"""Which GPUs have FP8 matrix units, by compute capability. Standard library only, since it is asked before torch."""

from __future__ import annotations

NEEDED = (8, 9)  # Ada
NEEDED_BY_ROWS = (9, 0)  # a scale a row
HOPPER = 9


def parsed(capability: str | None) -> tuple[int, int] | None:
    """Return a compute capability such as "9.0" as numbers; None if it is unknown."""
    if capability is None:
        return None
    major, _, minor = capability.partition(".")
    return int(major), int(minor)
