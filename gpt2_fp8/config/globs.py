"""Which files a path or a glob names: each once, even if links form a circle."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config.keys import show


def find(pattern: str) -> list[Path]:
    """Find what has this name, or else what matches it as a glob (`**` goes into folders).

    Returns files and anything else, sorted.
    """
    path = Path(pattern).expanduser()
    return [path] if os.path.lexists(path) else [Path(match) for match in sorted(_expand(str(path)))]


def real(path: str | Path) -> str:
    """Return the one path of a file that has several: absolute, and without links. Two words for one file have one."""
    return os.path.realpath(path)


def why_not(path: Path) -> str | None:
    """Return why a path that `find` gave cannot be read as a file of text, or None.

    Nothing is opened, because opening a pipe would wait.
    """
    if not str(path).isprintable():  # it would reach the terminal with every message about the file
        return f"the name of {show(str(path))} has control characters"
    try:
        if path.is_file():
            return None
    except OSError as error:  # of a folder that may not be entered
        return f"{path} cannot be read: {error.strerror}"
    return f"{path} is {'a folder' if path.is_dir() else 'no regular file' if path.exists() else 'a link to nothing'}"


def unreadable(path: Path) -> str | None:
    """Return why this user cannot read a regular file, or None."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def folders(top: str) -> Iterator[str]:
    """Yield `top` and the folders below it, except hidden ones.

    Links are followed, but each folder comes once.
    """
    left, seen = [top], set()
    while left:
        folder = left.pop()
        try:
            about = os.stat(folder or ".")
            entries = sorted(os.scandir(folder or "."), key=lambda entry: (entry.is_symlink(), entry.name))
        except OSError:
            continue
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        yield folder
        below = [entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry)]
        left += [os.path.join(folder, name) for name in reversed(below)]


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one. A link to itself is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _expand(pattern: str) -> set[str]:
    """Return the matches of `glob.glob(pattern, recursive=True)`, visiting each folder once.

    glob itself visits a folder again for every way that links lead to it.
    """
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return set(glob.glob(pattern))
    place = parts.index("**")
    above, below = os.sep.join(parts[:place]), os.sep.join(parts[place + 1 :]) or "*"
    tops = [os.sep] if parts[:place] == [""] else sorted(glob.glob(above)) if above else [""]
    inside = (folder for top in tops for folder in folders(top))
    return {match for folder in inside for match in _expand(os.path.join(glob.escape(folder), below))}
