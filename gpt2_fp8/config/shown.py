"""Text from others on a terminal: one line, nothing that a terminal obeys, no longer than anyone reads."""

from __future__ import annotations

import re

LONGEST = 1000  # characters of a cause or a remedy, which may name several files
LONGEST_WORD = 200  # and of what in it has no blank: a path may have 4096, a value of a stranger's file any number
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def printable(text: str) -> str:
    """Return `text` on one line, with everything escaped that a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """Return `text` with its line breaks, and everything else escaped that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def line(text: str, longest: int = LONGEST) -> str:
    """Return `text` as `printable` does; if it is longer than `longest`, only its beginning and its end.

    Long words are cut in the same way.
    """
    text = _LONG_WORD.sub(lambda word: shortened(word[0], LONGEST_WORD), text)
    text = printable(shortened(text, longest))  # shortened first, as a megabyte takes long to escape
    return shortened(text, longest)


def shortened(text: str, longest: int) -> str:
    """Return `text`, or its beginning and its end if it is too long.

    Between them stands how many characters are left out. The result has `longest` characters with that note, unless
    `longest` is too short for the note.
    """
    if len(text) <= longest:
        return text
    between = f" ...({len(text) - longest:,} characters)... "
    left = longest - len(between) if longest > 2 * len(between) else longest
    end = left // 4
    return f"{text[: left - end]}{between}{text[-end:]}"
