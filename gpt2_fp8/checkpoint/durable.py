"""Writing small files so that a crash or a power cut leaves the old one or the new one, never half. Stdlib only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Ask the disk to keep a file's bytes, or the names in a folder. Raises OSError when it cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically and durably. Raises OSError, leaving what was there before.

    Non-finite floats are refused (ValueError): they are not JSON, and other languages' readers choke on them.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)
