"""A comparison for a terminal and as Markdown. What may be a stranger's text is escaped for each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpt2_fp8.config.shown import harmless, line
from gpt2_fp8.measure import table
from gpt2_fp8.measure.table import Row
from gpt2_fp8.reports.sections import Section
from gpt2_fp8.reports.sweep_table import inert

_WIDEST = 60  # characters of a cell on a terminal
_WIDE = ("found", "note")
_LONGEST = 1_000  # of a sentence


def text(sections: Sequence[Section]) -> str:
    """Return the brief sections for a terminal."""
    parts = []
    for section in sections:
        if section.brief:
            rows = [
                {title: line(str(cell), 2 * _WIDEST if title in _WIDE else _WIDEST) for title, cell in row.items()}
                for row in section.rows
            ]
            told = [line(sentence, _LONGEST) for sentence in section.sentences]
            parts.append("\n".join([line(section.title), *told, *([table.text(rows, verbatim=True)] if rows else [])]))
    return "\n\n".join(parts)


def markdown(sections: Sequence[Section], picture: str | None) -> str:
    """Return all sections as Markdown. `picture`: the name of the picture's file, or None if there is none."""
    parts = ["# Comparison of runs"]
    for place, section in enumerate(sections):
        parts.append(f"## {inert(section.title)}")
        parts += [inert(sentence) for sentence in section.sentences] if len(section.sentences) < 2 else [
            "\n".join(f"- {inert(sentence)}" for sentence in section.sentences)
        ]  # fmt: skip
        parts += [table.markdown([_inert(row) for row in section.rows], verbatim=True)] if section.rows else []
        parts += [f"{inert(title)}:\n\n{_fenced(sample)}" for title, sample in section.texts]
        if place == 0 and picture:
            parts.append(f"![losses, speed and gradient norms]({picture})")
    return "\n\n".join(parts) + "\n"


def _inert(row: Row) -> Row:
    return {inert(title): inert(str(cell)) for title, cell in row.items()}


def _fenced(sample: str) -> str:
    """Return a text as a block of code, with a fence longer than any in it."""
    longest = max((len(found) for found in re.findall(r"`+", sample)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{harmless(sample)}\n{fence}"
