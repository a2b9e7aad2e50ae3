"""What the user has to repair in a text file before it can be read: found in its first bytes, or in its footer."""

from __future__ import annotations

from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.data import formats
from gpt2_fp8.data.units import TextFile

_HEAD_BYTES = 4096
MARKS = {  # first bytes of files that are not text, whatever their name: what it is, and how to make it text
    b"\x1f\x8b": ("compressed by gzip", "unpack it: gunzip"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it: unzstd; JSON lines may also be called .jsonl.zst"),
    b"BZh": ("compressed by bzip2", "unpack it: bunzip2"),
    b"\xfd7zXZ\0": ("compressed by xz", "unpack it: unxz"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "unpack it: unlz4"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"PK\3\4": ("a zip archive", "unpack it"),
    b"PAR1": ("a parquet file", "call it .parquet"),
    b"%PDF-": ("a PDF", "give its text"),
    b"\xff\xfe\0\0": ("UTF-32", "convert it: iconv -f UTF-32 -t UTF-8"),
    b"\0\0\xfe\xff": ("UTF-32", "convert it: iconv -f UTF-32 -t UTF-8"),
    b"\xff\xfe": ("UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
}


def problems(path: Path, column: str) -> list[Problem]:
    """Return what is wrong with a file that exists; empty if nothing is."""
    kind = formats.ending(path)
    if kind is None:
        ids = "; data=token_files reads token ids" if path.name.lower().endswith(".bin") else ""
        return [Problem(f"unknown kind of file: {path}", f"give files that end in {', '.join(formats.ENDINGS)}{ids}")]
    try:
        with formats.content_errors(str(path)):
            file = TextFile.local(path)
            file.open().close()
            if kind in (".txt", ".jsonl") and (found := _no_text(path)):
                return [found]
            if kind != ".txt":
                formats.check_column(file, column)
    except UserError as error:
        return error.problems
    except OSError as error:
        return formats.unreadable(path, error).problems
    return []


def _no_text(path: Path) -> Problem | None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for mark, (what, remedy) in MARKS.items():
        if head.startswith(mark):
            return Problem(f"{path} is no text: it is {what}", f"{remedy}; or leave it out")
    text = head.rstrip(b"\0")  # a file that was cut short by a crash ends in these
    if not text or text.count(0) * 8 > len(text):
        return Problem(
            f"{path} is no text: its first bytes are {'only NUL' if not text else 'full of NUL'}",
            "give its text in UTF-8 (UTF-16 without a mark looks like this: iconv -f UTF-16LE -t UTF-8); "
            "or leave it out",
        )
    return None
