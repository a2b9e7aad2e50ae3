"""Which GPUs have FP8 matrix units, by compute capability. Standard library only, since it is asked before torch."""

from __future__ import annotations

import re

NEEDED = (8, 9)  # Ada
NEEDED_BY_ROWS = (9, 0)  # a scale a row
HOPPER = 9


def parsed(capability: str | None) -> tuple[int, int] | None:
    """Return a compute capability such as "9.0" as numbers; None if it is unknown, or another kind of text."""
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", capability or "", re.ASCII)
    return (int(found[1]), int(found[2])) if found else None
