"""Whether a stream is a terminal that can redraw a line, and whether such a line is on it now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

redrawn = False  # whether a progress bar is on the terminal: what is written past it must erase it first
ERASE = "\r\x1b[2K"


def redraws(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a progress bar can be drawn: on a terminal that is not dumb, unless NO_COLOR asks for plain text.

    Source of NO_COLOR: https://no-color.org, any value but the empty one.
    """
    if environment.get("TERM", "dumb") in ("dumb", "unknown", "") or environment.get("NO_COLOR"):
        return False
    try:
        return stream.isatty()
    except (OSError, ValueError):  # it is closed
        return False
