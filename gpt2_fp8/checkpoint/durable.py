"""Writing small files so that a crash or a power cut leaves the old one or the new one, never half. Stdlib only."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Ask the disk to keep a file's bytes, or the names in a folder. Raises OSError if it cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, as `write_text`. Raises ValueError for a float that is not finite."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def replace_nonfinite(value: Any) -> Any:
    """Replace the floats in plain values that are not finite by None: JSON has none of them."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, atomically and durably. After an OSError the old file is still there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def append(path: Path, content: bytes) -> None:
    """Append to a file that is there, all or nothing. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def put_aside(path: Path) -> Path:
    """Rename `path` to the first free of `NAME.aside-1`, `NAME.aside-2`, ..., and return it. Raises OSError."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.aside-{number}")):
        number += 1
    os.rename(path, aside)
    return aside
