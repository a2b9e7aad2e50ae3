"""Which files a path or a glob names."""

from __future__ import annotations

import glob
import os
from pathlib import Path


def find(pattern: str) -> list[Path]:
    """Find what has this name, or else what matches it as a glob (`**` goes into folders).

    Returns files and anything else, sorted.
    """
    path = Path(pattern).expanduser()
    return [path] if os.path.lexists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))


def real(path: str | Path) -> str:
    """Return the one path of a file that has several: absolute, and without links. Two words for one file have one."""
    return os.path.realpath(path)


def why_not(path: Path) -> str | None:
    """Return why a path that `find` gave cannot be read as a file of text, or None. Nothing is opened."""
    if path.is_file():
        return None if os.access(path, os.R_OK) else f"{path} cannot be read"
    return f"{path} is {'a folder' if path.is_dir() else 'no regular file'}"
