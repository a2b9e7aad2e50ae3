"""Reading JSON files. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    """Return the value in a JSON file. Raises OSError, or ValueError for one that is not JSON in UTF-8."""
    return json.loads(path.read_text(encoding="utf-8"))
