"""A text file that a key names: read whole, or said what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config import globs
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show


def read(key: str, file: str, largest: int, remedy: str, problems: list[Problem]) -> str:
    """Return the text of the UTF-8 file that `key` names, up to `largest` bytes; "" after adding to `problems`.

    A byte order mark is no part of it.
    """
    path = Path(file).expanduser()
    try:
        reason = "does not exist" if not path.exists() else globs.why_not(path) or globs.unreadable(path)
        if not reason and path.stat().st_size > largest:
            reason = f"has more than {largest:,} bytes"
        if not reason:
            return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # bytes that are no UTF-8; a name with a NUL
        reason = f"cannot be read: {error}"
    problems.append(Problem(f"{key}={show(file)}: {reason} (looked in {Path.cwd()})", remedy))
    return ""


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    r"""Return the lines that are not blank, with their numbers, as training reads JSON lines.

    They end in "\n" alone: a text in JSON may have other characters that end a line. Joined files have byte order marks
    at inner lines too, which are left out.
    """
    for number, raw in enumerate(text.split("\n"), 1):
        if (line := raw.removeprefix("\ufeff")).strip():
            yield number, line
