"""What a file of a stranger's may cost: how long a line is, and how much a small file may unfold to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_fp8.config.errors import UserError

LINE = 128 << 20  # bytes; a longer line is no document
# Text compresses to a tenth, and to a hundredth where it repeats itself.
FREE = 64 << 20  # bytes that a unit may come to, however small its file
RATIO = 200  # and for each byte of the file, besides
ROW = 256  # bytes that a row counts for beside its own, since it takes as long


def lines(file: Any, size: int) -> Iterator[tuple[bytes | None, int]]:
    """Each line, or None for one of more than `LINE` bytes, and its length; of the next `size` bytes."""
    left = size
    while left > 0 and (line := file.readline(min(left, LINE))):
        length = len(line)
        if length < LINE or line.endswith(b"\n"):
            left -= length
            yield line, length
            continue
        while length < left and line and not line.endswith(b"\n"):
            line = file.readline(min(left - length, 1 << 20))
            length += len(line)
        left -= length
        yield None, length


def allowed(stored: int) -> int:
    """How many bytes the text of a unit may come to of which `stored` bytes are in the file."""
    return FREE + RATIO * stored


def unfolds(path: str | Path) -> UserError:
    return UserError.of(
        f"{path} is small, and unfolds to more than {RATIO} times its size",
        "leave it out; if it is what it should be, unpack it to .jsonl",
    )
