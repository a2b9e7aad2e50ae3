"""Files and folders that keys name: which there are, what is in a small one, whether a folder can be written."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.shown import harmless

T = TypeVar("T")
LOCK = ".lock"  # in a run's folder


def find(pattern: str) -> list[Path]:
    """Find what has this name, or else what matches it as a glob (`**` goes into folders), sorted."""
    path = Path(pattern).expanduser()
    return [path] if os.path.lexists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))


def why_unreadable(path: Path) -> str | None:
    """Return why a path that `find` gave cannot be read as a file of text, or None. Nothing is opened."""
    if path.is_file():
        return None if os.access(path, os.R_OK) else f"{path} cannot be read"
    return f"{path} is {'a folder' if path.is_dir() else 'no regular file'}"


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises OSError, or ValueError for one that is not JSON in UTF-8."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(
    key: str, file: str, parse: Callable[[str], T], problems: list[Problem], remedy: str = "", comment: str = ""
) -> list[T]:
    """Return what `parse` makes of each line, but blank ones and comments, of the UTF-8 file that `key` names.

    What is wrong is added to `problems`, by the line's number. Lines end in a line break alone, since a text in JSON
    may have other characters that end one, and joined files have byte order marks at inner lines too.
    """
    found, before = [], len(problems)
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # bytes that are no UTF-8; a name with a NUL
        reason = getattr(error, "strerror", None) or error
        problems.append(Problem(f"{key}={show(file)}: cannot be read: {reason} (looked in {Path.cwd()})"))
        return []
    for number, line in enumerate(lines, 1):
        text = line.removeprefix("\ufeff").removesuffix("\r")
        try:
            if text.strip() and not (comment and text.lstrip().startswith(comment)):
                found.append(parse(text))
        except (ValueError, RecursionError) as error:
            problems.append(Problem(f"{key}={show(file)}, line {number}: {error}", remedy))
    if not found and len(problems) == before:
        problems.append(Problem(f"{key}={show(file)} has no line", remedy))
    return found


def check_folder(path: str | Path, setting: str) -> list[Problem]:
    """Check that the folder of the key `setting` can be written, or made with its parents. Nothing made stays."""
    text = str(path)
    reason = None if text.strip() and text.isprintable() else "is no path"
    try:
        folder = Path(text).expanduser().absolute()
        existing = next(above for above in (folder, *folder.parents) if os.path.lexists(above))
        # os.access is wrong on network filesystems, and does not see that there is no byte or inode left
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
    except (OSError, ValueError) as error:  # also a name that is too long, or has a NUL
        reason = reason or f"cannot be written: {getattr(error, 'strerror', None) or error}"
    return [Problem(f"{setting}={show(text)}: {reason}", keys=(setting,))] if reason else []


def check_new_folder(folder: Path, setting: str) -> list[Problem]:
    """Check that a program can write a folder, which is not there yet or empty: see `check_folder`."""
    problems = check_folder(folder, setting)
    if not problems and os.path.isdir(folder) and os.listdir(folder):
        problems.append(Problem(f"{folder} is there already, and not empty", "name a folder that is not there yet"))
    return problems


def check_untaken(folder: Path) -> list[Problem]:
    """Check that a fresh run may have a folder: its checkpoints would replace those of another run."""
    saved = sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))
    if not saved:
        return []
    remedy = "ckpt_path=last continues it; another run_name starts a new one"
    return [Problem(f"{folder} already holds a run, saved up to {saved[-1]}", remedy, ("run_name",))]


def read_holder(folder: Path) -> str | None:
    """Return which process holds a run's folder, as its lock says; None: as seen from here, nothing holds it."""
    with suppress(OSError):
        return harmless((folder / LOCK).read_text(encoding="utf-8", errors="replace").strip())
    return None
