"""What a file from a stranger may cost: the length of a line, and the size that a small file unpacks to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_fp8.config.errors import UserError

LINE_BYTES = 128 << 20  # a longer line is no document
# Text compresses to a tenth, and to a hundredth if it repeats itself.
FREE_BYTES = 64 << 20  # that a unit's text may have, however small its file
RATIO = 200  # bytes of text in addition, for each byte of the file
ROW_BYTES = 256  # that count for a row in addition to its own, since it takes as long


def lines(file: Any, size: int) -> Iterator[tuple[bytes | None, int]]:
    """Return the lines of the next `size` bytes, each with its length; None for a line of more than `LINE_BYTES`."""
    left = size
    while left > 0 and (line := file.readline(min(left, LINE_BYTES))):
        length = len(line)
        if length < LINE_BYTES or line.endswith(b"\n"):
            left -= length
            yield line, length
            continue
        while length < left and line and not line.endswith(b"\n"):
            line = file.readline(min(left - length, 1 << 20))
            length += len(line)
        left -= length
        yield None, length


def allowed(stored: int) -> int:
    """Return how many bytes of text a unit may have if it takes `stored` bytes in its file."""
    return FREE_BYTES + RATIO * stored


def unfolds(path: str | Path) -> UserError:
    """Return the error for a file whose text is larger than `allowed`."""
    return UserError.of(
        f"{path} is small, and unpacks to more than {RATIO} times its size",
        "leave it out; if it is what it should be, unpack it to .jsonl",
    )
