"""How text, times and values are shown: on a terminal, where a stranger's text may stand in them, and as words to type.

Text from others is one line, without anything that a terminal obeys, and no longer than anyone reads. A value to type
is quoted for Hydra where its grammar lacks a character.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path

LONGEST = 1000  # characters of a cause or a remedy, which may name several files
LONGEST_WORD = 200  # and of what in it has no blank: a path may have 4096, a value of a stranger's file any number
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_BARE = re.compile(r"[A-Za-z0-9_/.+$%*@?|-]+")  # what Hydra's grammar has outside of quotes, apart from blanks
_IN_QUOTES = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
# What Hydra reads as a number or a truth value, which are not typed so again.
_NO_TEXT = r"(?i:(?!-?\d+(?![\w.]))[+-]?(?:[\d_.]*\d[\d_.]*(?:e[+-]?[\d_]+)?|inf|nan)|true|false)"
_ITEM = re.compile(rf"(?s){_IN_QUOTES}|(^[^=]*=|[\[,]\s*)({_NO_TEXT})(?=\s*(?:[\],]|$))")


def printable(text: str) -> str:
    """Return `text` on one line, with everything escaped that a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """Return `text` with its line breaks, and everything else escaped that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def line(text: str, longest: int = LONGEST) -> str:
    """Return `text` as `printable` does; if it, or a word of it, is too long, only its beginning and its end."""
    text = _LONG_WORD.sub(lambda word: shortened(word[0], LONGEST_WORD), text)
    text = printable(shortened(text, longest))  # shortened first, as a megabyte takes long to escape
    return shortened(text, longest)


def shortened(text: str, longest: int) -> str:
    """Return `text`, or if it is too long its beginning and its end, and between them how much is left out."""
    if len(text) <= longest:
        return text
    between = f" ...({len(text) - longest:,} characters)... "
    left = longest - len(between) if longest > 2 * len(between) else longest
    end = left // 4
    return f"{text[: left - end]}{between}{text[-end:]}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units: `0.4 s`, `23 s`, `1 min 23 s`, `2 h 31 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    minutes = round(seconds / _MINUTE)
    if minutes < _DAY // _MINUTE:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / _HOUR)
    return f"{hours // 24:,} d {hours % 24} h"


def counted(number: int, what: str) -> str:
    """Return a number with what it counts, an English noun that takes an s: `1 step`, `19,073 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def as_typed(path: Path, here: Path | None = None) -> Path:
    """Return `path` relative to the folder `here` (None: the current one) if it lies in it, else as it is."""
    here = here or Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def as_text(word: str) -> str:
    """Return `key=value` with quotes around each item of which Hydra would make something else than text."""
    return _ITEM.sub(lambda found: f'{found[1]}"{found[2]}"' if found[2] else found[0], word)


def setting(key: str, text: str) -> str:
    """Return the word that sets a text key, quoted for Hydra if need be, and not yet for the shell."""
    bare = _BARE.fullmatch(text.replace(" ", "")) and text == text.strip() and text.lower() != "null"
    return f"{key}={text if bare else _quoted(text)}"


def meant(value: str) -> str | float:
    """Return what typed values are compared by: of a number, which may be written in several ways, its value."""
    with suppress(ValueError):
        return int(value)  # exactly, also where a float has too few digits
    with suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number
    return value


def _quoted(text: str) -> str:
    """Return a text in double quotes: Hydra takes a backslash for its own in front of one only."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    ends = len(text) - len(text.rstrip("\\"))
    return f'"{escaped}{chr(92) * ends}"'
