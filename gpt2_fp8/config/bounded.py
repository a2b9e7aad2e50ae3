"""Reading small files that a stranger may have made: only regular files of bounded size. Stdlib only.

A checkpoint may come from elsewhere. A link in it could lead to any file of this machine, and a pipe would block. JSON
takes up to 27 times its size in memory.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST_BYTES = 32 * 2**20  # of JSON; a run's state has some 100 kB, and 16 kB more for each rank
MOST_VALUES = 2_000_000  # in a file; each takes up to 80 bytes once it is read


def regular_file(path: Path) -> os.stat_result:
    """Return the `lstat` of `path`. Raises OSError for anything but a regular file, so also for a link."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError("it is a link, and links are not followed")
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is a folder" if stat.S_ISDIR(found.st_mode) else "it is no regular file")
    return found


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: as `regular_file`.
        ValueError: the file is too large, has too many values, or is not JSON.
    """
    size = regular_file(path).st_size
    if size == 0:
        raise ValueError("it is empty")
    refuse_large(size)
    with open(path, "rb") as file:
        data = file.read(LARGEST_BYTES + 1)
    check(data)
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check(data: bytes) -> None:
    """Raise ValueError for JSON of more than `LARGEST_BYTES` or `MOST_VALUES`, before anything parses it."""
    refuse_large(len(data))
    values = 1 + sum(map(data.count, (b",", b"[", b"{")))  # at most: a comma may also be part of a string
    if values > MOST_VALUES:
        raise ValueError(f"it has up to {values:,} values, and at most {MOST_VALUES:,} are read")


def refuse_large(size: int) -> None:
    """Raise ValueError for a file of more than `LARGEST_BYTES`."""
    if size > LARGEST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and at most {LARGEST_BYTES:,} are read")
