"""How a value is typed: quoted for Hydra where its grammar lacks a character, and the whole word for the shell."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress

_BARE = re.compile(r"[A-Za-z0-9_/.+$%*@?|-]+")  # what Hydra's grammar has outside of quotes, apart from blanks
_REFERENCE = re.compile(r"\$\{[^}]*\}")
_IN_QUOTES = re.compile(r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""")
# What Hydra reads as a number or a truth value, which are not typed so again.
_NO_TEXT = r"(?i:(?!-?\d+(?![\w.]))[+-]?(?:[\d_.]*\d[\d_.]*(?:e[+-]?[\d_]+)?|inf|nan)|true|false)"
_ITEM = re.compile(rf"{_IN_QUOTES.pattern}|(^[^=]*=|[\[,]\s*)({_NO_TEXT})(?=\s*(?:[\],]|$))")
_PART = re.compile(rf"{_IN_QUOTES.pattern}|.", re.DOTALL)
_CLOSING = {"[": "]", "{": "}"}


def word(key: str, value: str, several: bool = False) -> str:
    """Return `key=value` as a word of a shell's line. Of a list `[a,b]` each item has quotes of its own.

    `several`: so has each value of `a,b`, which is otherwise one text.
    """
    values = ",".join(map(_item, _parts(value))) if several else _value(value)
    return shlex.quote(f"{key}={values}")


def listed(key: str, items: Iterable[str]) -> str:
    """Return the word that sets `key` to a list of texts, quoted for the shell in any case, as people see lists."""
    inner = f"{key}=[{','.join(map(_text, items))}]"
    name, _, value = inner.partition("=")
    return f"{name}='{value}'" if shlex.quote(value) in (value, f"'{value}'") else shlex.quote(inner)


def items(text: str) -> list[str] | None:
    """Return the items of a text `[a,b]` as they are typed, with quotes of their own; None if it is no list."""
    return _parts(text[1:-1]) if text.startswith("[") and text.endswith("]") else None


def unquoted(item: str) -> str:
    """Return what an item is meant to be, without quotes of its own."""
    return re.sub(r"\\([\"'])", r"\1", item[1:-1]) if _IN_QUOTES.fullmatch(item) else item


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


def _value(text: str) -> str:
    closing = _CLOSING.get(text[:1])
    if closing is None or not text.endswith(closing) or len(text) == 1:
        return quoted(text.strip("'\""))
    inner = ",".join(map(_item if closing == "]" else _pair, _parts(text[1:-1])))
    return f"{text[0]}{inner}{closing}"


def _item(text: str) -> str:
    return _value(text) if text[:1] in _CLOSING else _text(text)


def _pair(text: str) -> str:
    name, colon, value = text.partition(":")
    return f"{name.strip()}: {_item(value.strip())}" if colon else _item(text)


def _text(text: str) -> str:
    """Return a text in quotes, if it needs them and has none."""
    bare = any(form.fullmatch(text) for form in (_BARE, _REFERENCE, _IN_QUOTES))
    return text if bare else quoted(text)


def quoted(text: str) -> str:
    """Return a text in double quotes: Hydra takes a backslash for its own in front of one only."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    ends = len(text) - len(text.rstrip("\\"))
    return f'"{escaped}{chr(92) * ends}"'


def _parts(text: str) -> list[str]:
    """Split at the commas that are in no brackets and no quotes."""
    parts, depth = [""], 0
    for match in _PART.finditer(text):
        piece = match[0]
        depth += (piece in ("[", "{")) - (piece in ("]", "}"))
        if piece == "," and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]
