"""Files and folders that keys name: which there are, what is in a small one, whether a folder can be written."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show


def find(pattern: str) -> list[Path]:
    """Find what has this name, or else what matches it as a glob (`**` goes into folders).

    Returns files and anything else, sorted.
    """
    path = Path(pattern).expanduser()
    return [path] if os.path.lexists(path) else sorted(map(Path, glob.glob(str(path), recursive=True)))


def real_path(path: str | Path) -> str:
    """Return the one path of a file that has several: absolute, and without links."""
    return os.path.realpath(path)


def why_unreadable(path: Path) -> str | None:
    """Return why a path that `find` gave cannot be read as a file of text, or None. Nothing is opened."""
    if path.is_file():
        return None if os.access(path, os.R_OK) else f"{path} cannot be read"
    return f"{path} is {'a folder' if path.is_dir() else 'no regular file'}"


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises OSError, or ValueError for one that is not JSON in UTF-8."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_text(key: str, file: str, problems: list[Problem]) -> str:
    """Return the text of the UTF-8 file that `key` names, without a byte order mark; "" after adding to `problems`."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # bytes that are no UTF-8; a name with a NUL
        reason = getattr(error, "strerror", None) or error
        problems.append(Problem(f"{key}={show(file)}: cannot be read: {reason} (looked in {Path.cwd()})"))
    return ""


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    r"""Return the lines that are not blank, with their numbers, as training reads JSON lines.

    They end in "\n" alone: a text in JSON may have other characters that end a line. Joined files have byte order marks
    at inner lines too, which are left out.
    """
    for number, raw in enumerate(text.split("\n"), 1):
        if (line := raw.removeprefix("\ufeff")).strip():
            yield number, line


def check_folder(path: str | Path, setting: str) -> list[Finding]:
    """Check that the folder of the key `setting` can be written, or made with its parents. Nothing made stays."""
    reason = _why_no_folder(str(path))
    return [Finding.of(setting, f"{setting}={show(str(path))}: {reason}")] if reason else []


def _why_no_folder(path: str) -> str | None:
    if not path.strip() or not path.isprintable():
        return "is no path"
    try:
        folder = Path(path).expanduser().absolute()
        existing = next(above for above in (folder, *folder.parents) if os.path.lexists(above))
        # os.access is wrong on network filesystems, and does not see that there is no byte or inode left
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
    except OSError as error:  # also a name that is too long
        return f"cannot be written: {error.strerror or error}"
    return None


def check_untaken(folder: Path) -> list[Finding]:
    """Check that a fresh run may have a folder: its checkpoints would replace those of another run."""
    saved = sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))
    if not saved:
        return []
    remedy = "ckpt_path=last continues it; another run_name starts a new one"
    return [Finding.of("run_name", f"{folder} already holds a run, saved up to {saved[-1]}", remedy)]
