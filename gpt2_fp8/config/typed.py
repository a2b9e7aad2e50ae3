"""How a value is typed: quoted for Hydra where its grammar lacks a character."""

from __future__ import annotations

import math
import re
from contextlib import suppress

_BARE = re.compile(r"[A-Za-z0-9_/.+$%*@?|-]+")  # what Hydra's grammar has outside of quotes, apart from blanks
_IN_QUOTES = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
# What Hydra reads as a number or a truth value, which are not typed so again.
_NO_TEXT = r"(?i:(?!-?\d+(?![\w.]))[+-]?(?:[\d_.]*\d[\d_.]*(?:e[+-]?[\d_]+)?|inf|nan)|true|false)"
_ITEM = re.compile(rf"(?s){_IN_QUOTES}|(^[^=]*=|[\[,]\s*)({_NO_TEXT})(?=\s*(?:[\],]|$))")


def as_text(word: str) -> str:
    """Return `key=value` with quotes around each item of which Hydra would make something else than text."""
    return _ITEM.sub(lambda found: f'{found[1]}"{found[2]}"' if found[2] else found[0], word)


def setting(key: str, text: str) -> str:
    """Return the word that sets a text key, quoted for Hydra if need be, and not yet for the shell."""
    bare = _BARE.fullmatch(text.replace(" ", "")) and text == text.strip() and text.lower() != "null"
    return f"{key}={text if bare else quoted(text)}"


def meant(value: str) -> str | float:
    """Return what typed values are compared by: of a number, which may be written in several ways, its value."""
    with suppress(ValueError):
        return int(value)  # exactly, also where a float has too few digits
    with suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number
    return value


def quoted(text: str) -> str:
    """Return a text in double quotes: Hydra takes a backslash for its own in front of one only."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    ends = len(text) - len(text.rstrip("\\"))
    return f'"{escaped}{chr(92) * ends}"'
