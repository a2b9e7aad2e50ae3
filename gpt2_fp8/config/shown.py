"""How text, times, values and tables are shown: on a terminal, without what it would obey, and as words to type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

LONGEST = 1000  # characters of a cause or a remedy
_LONGEST_CELL = 120  # and of a table's cell
_NUMBER = re.compile(r"[-+]?[\d.,]+%?")
_MARKUP = re.compile(r"([\\`*\[\]<|])")
_THOUSANDS = {10**9: "B", 10**6: "M", 10**3: "k"}  # with the largest first
_BARE = re.compile(r"[A-Za-z0-9_/.+$%*@?|-]+")  # what Hydra's grammar has outside of quotes, apart from blanks


def printable(text: str, kept: str = "") -> str:
    """Return `text` with everything escaped that a terminal would obey, but the characters `kept`."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """Return `text` as `printable` does, with its line breaks."""
    return printable(text, "\n\t")


def line(text: str, longest: int = LONGEST) -> str:
    """Return `text` on one line as `printable` does; if it is too long, only its beginning and its end."""
    return shorten(printable(shorten(text, longest)), longest)


def shorten(text: str, longest: int) -> str:
    """Return `text`, or if it is too long its beginning and its end, and between them how much is left out."""
    if len(text) <= longest:
        return text
    between = f" ...({len(text) - longest:,} characters)... "
    left = longest - len(between) if longest > 2 * len(between) else longest
    end = left // 4
    return f"{text[: left - end]}{between}{text[-end:]}"


def one_line(error: object, limit: int = 200) -> str:
    """Shorten a text to one line of at most `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def duration(seconds: float) -> str:
    """Return a time in its two largest units: `0.4 s`, `23 s`, `1 min 23 s`, `2 h 31 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    if (whole := round(seconds)) < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if (minutes := round(seconds / 60)) < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h"


def format_count(number: int, what: str) -> str:
    """Return a number with what it counts, an English noun that takes an s: `1 step`, `19,073 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_large(number: float) -> str:
    """Return a number in its thousands: `950`, `10 k`, `1.5 M`, `19.9 B`."""
    unit = next((unit for unit in _THOUSANDS if abs(number) >= 0.9995 * unit), None)  # three digits are shown
    return f"{number:.3g}" if unit is None else f"{number / unit:.3g} {_THOUSANDS[unit]}"


def as_typed(path: Path, here: Path | None = None) -> Path:
    """Return `path` relative to the folder `here` (None: the current one) if it lies in it, else as it is."""
    here = here or Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def format_override(key: str, text: str) -> str:
    """Return the word that sets a text key, quoted for Hydra if need be, and not yet for the shell."""
    bare = _BARE.fullmatch(text.replace(" ", "")) and text == text.strip() and text.lower() != "null"
    return f"{key}={text if bare else quote(text)}"


def quote(text: str) -> str:
    """Return a text as the value of an override: in quotes, with everything escaped that Hydra would read."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return "'{}'".format(escaped.replace("${", "\\${"))


def inert(cell: str, longest: int = _LONGEST_CELL) -> str:
    """Return a text on one line, which Markdown shows as it is and a terminal does not obey."""
    return _MARKUP.sub(r"\\\1", line(cell, longest))


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table of aligned columns; columns without any text are left out."""
    texts = [{title: "" if cell is None else str(cell) for title, cell in row.items()} for row in rows]
    titles = [t for t in dict.fromkeys(key for row in texts for key in row) if any(row.get(t) for row in texts)]
    if not titles:
        return ""
    cells = [[inert(row.get(title, "")) for title in titles] for row in texts]
    columns = list(zip(map(inert, titles), *cells, strict=True))
    right = [all(_NUMBER.fullmatch(cell) for cell in column[1:] if cell) for column in columns]
    widths = [max(3, *map(len, column)) for column in columns]
    rule = ["-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)]
    lines = [[column[0] for column in columns], rule, *cells]
    return "\n".join(
        f"| {' | '.join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))} |"
        for row in lines
    )
