"""The rows of `bench.rows`: a file of lines `NAME: WORDS`, where the words are those of a run.

An empty line, or one that begins with `#`, says nothing. Each row is a whole configuration: it stands by itself.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from gpt2_fp8.config import text_file
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show

FORM = "write NAME: WORDS on each line, such as  fp8: precision=fp8_hybrid recipe=delayed"
_EXAMPLE = "name a text file of rows, such as {}=benchmarks/rows/ablation.txt"
_LONGEST_NAME = 60  # characters


class BenchRow(NamedTuple):
    """A row: its name, and the words of its run."""

    name: str
    words: tuple[str, ...]


def read(file: str, problems: list[Problem], key: str = "bench.rows") -> list[BenchRow]:
    """Return the rows of a file, that `key` names. What is wrong is added to `problems`, each line by its number."""
    rows: list[BenchRow] = []
    before = len(problems)
    for number, line in enumerate(text_file.read(key, file, _EXAMPLE.format(key), problems).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, rest = (part.strip() for part in line.partition(":"))
        reason = None
        if not colon or not name or not name.isprintable() or len(name) > _LONGEST_NAME:
            reason = "it has no name before a colon" if not colon or not name else "its name is too long, or no text"
        elif name in [row.name for row in rows]:
            reason = f"a row above has the name {show(name)}"
        try:
            words = tuple(shlex.split(rest, comments=True))
        except ValueError as error:
            reason = f"its words cannot be read: {error}"
        if reason:
            problems.append(Problem(f"{key}={show(file)}, line {number}: {reason}", FORM))
        else:
            rows.append(BenchRow(name, words))
    if not rows and len(problems) == before:
        problems.append(Problem(f"{key}={show(file)} holds no row", FORM))
    return rows
