"""A text file that a key names: read whole, or said what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show


def read(key: str, file: str, form: str, problems: list[Problem]) -> str:
    """Return the text of the UTF-8 file that `key` names; "" after adding to `problems`. `form`: of the file.

    A byte order mark is no part of it.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # bytes that are no UTF-8; a name with a NUL
        reason = getattr(error, "strerror", None) or error
        problems.append(Problem(f"{key}={show(file)}: cannot be read: {reason} (looked in {Path.cwd()})", form))
    return ""


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    r"""Return the lines that are not blank, with their numbers, as training reads JSON lines.

    They end in "\n" alone: a text in JSON may have other characters that end a line. Joined files have byte order marks
    at inner lines too, which are left out.
    """
    for number, raw in enumerate(text.split("\n"), 1):
        if (line := raw.removeprefix("\ufeff")).strip():
            yield number, line
