"""Files of token ids (.bin): what their headers say, what is wrong with one, its units and its ids.

- nanoGPT: no header, ids of 16 bits.
- llm.c, modded-nanogpt: 256 int32 (magic 20240520, version 1, number of ids), then ids of 16 bits.
- llm.c for Llama 3: the same with magic 20240801 and version 7, then ids of 32 bits.

All of it is little-endian. Sources: nanoGPT's `data/openwebtext/prepare.py`, llm.c's `dev/data/data_common.py`.
The first two bytes of both magic numbers would be an id above GPT-2's largest, so no file of GPT-2's ids begins so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.mixture import LLAMA_3, LLM_C
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data import file_check, formats
from gpt2_fp8.data.ids import Tokens, dtype_of
from gpt2_fp8.data.units import TextFile, Unit

ENDING = ".bin"
HEADER_BYTES = 1024
UNIT_IDS = 2 << 20  # about the tokens of a unit of text
_KINDS = {LLM_C: (1, "uint16"), LLAMA_3: (7, "uint32")}  # magic: version, ids
_HEAD_BYTES = 8192
_ENOUGH = 64  # bytes, to judge by what they look like
_CUT_SHORT = "it was not written to its end, or was cut: make it again, or leave it out"


class Form(NamedTuple):
    """Where a file's ids are, and of which dtype they are on disk."""

    dtype: np.dtype[np.unsignedinteger]
    start: int  # bytes of header
    size: int  # bytes of the file


def problems(path: Path, headerless: str) -> list[Problem]:
    """Return what is wrong with a file that exists, by its size and its first bytes; empty if nothing is."""
    if not path.name.lower().endswith(ENDING):
        return [Problem(f"unknown kind of file: {path}", f"give files of token ids, which end in {ENDING}")]
    try:
        _check_first(path, form_of(path, headerless))
    except UserError as error:
        return error.problems
    except OSError as error:
        return formats.unreadable(path, error).problems
    return []


def form_of(path: Path, headerless: str) -> Form:
    """Read a file's header. `headerless`: the dtype of its ids if it has none.

    Raises UserError for a header that does not fit the file, and OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    numbers = struct.unpack("<3i", head[:12].ljust(12, b"\0"))
    if numbers[0] not in _KINDS:
        if _is_other_header(head):
            remedy = f"give files of ids, whose magic numbers are {' and '.join(map(str, _KINDS))}"
            raise _unfit(path, f"has a header of llm.c's kind with the unknown magic number {numbers[0]}", remedy)
        form = Form(np.dtype(headerless).newbyteorder("<"), 0, size)
        if size % form.dtype.itemsize:
            raise _unfit(path, f"has {size:,} bytes, which are no whole number of {headerless} ids", _CUT_SHORT)
        return form
    magic, version, count = numbers
    known, name = _KINDS[magic]
    if version != known:
        remedy = f"convert it to version {known}, or leave it out"
        raise _unfit(path, f"has the magic number {magic} with version {version}, which is unknown", remedy)
    form = Form(np.dtype(name).newbyteorder("<"), HEADER_BYTES, size)
    there = max(0, size - HEADER_BYTES)
    if count < 1 or there != count * form.dtype.itemsize:
        why = f"has a header of {count:,} {name} ids, and {there:,} bytes after it"
        raise _unfit(path, why, _CUT_SHORT)
    return form


def units(path: Path, headerless: str) -> list[Unit]:
    """Cut a file into ranges of about `UNIT_IDS` ids. Raises UserError for a hole, and for what `form_of` refuses."""
    form = form_of(path, headerless)
    step = UNIT_IDS * form.dtype.itemsize
    cuts = [form.start]
    with path.open("rb") as file:
        for at in range(form.start + step, form.size - step // 2, step):
            file.seek(at)
            if not file.read(_HEAD_BYTES).strip(b"\0"):  # a file of 200 GB may be a hole
                raise _unfit(path, f"has only zeros in the {_HEAD_BYTES:,} bytes from {at:,} on", _CUT_SHORT)
            cuts.append(at)
    about, kind = TextFile.local(path).version, form.dtype.name
    return [Unit(f"{path.name} {form.size} {kind} [{a}:{b}]", str(path), a, b, about)
            for a, b in pairwise([*cuts, form.size])]  # fmt: skip


def read(unit: Unit, headerless: str, vocab_size: int) -> Tokens:
    """Return the ids of a unit, [n], in the dtype of a vocabulary of `vocab_size`.

    Raises:
        UserError: the file is another one now; or an id is not in the vocabulary: with its place in the file.
        OSError: the system cannot read it, which may pass.
    """
    path = Path(unit.path)
    form = form_of(path, headerless)
    ids = np.fromfile(path, form.dtype, count(unit, form.dtype), offset=unit.start)
    if len(ids) < count(unit, form.dtype):
        cause = f"{path} has become shorter: {printable(unit.name)} is not all there"
        raise UserError.of(cause, "restore it as it was, and continue with ckpt_path=last")
    if len(odd := np.flatnonzero(ids >= vocab_size)):
        at = (unit.start - form.start) // form.dtype.itemsize + int(odd[0])
        raise UserError([_outside(path, at, int(ids[odd[0]]), vocab_size, form)])
    return ids.astype(dtype_of(vocab_size), copy=False)


def count(unit: Unit, dtype: np.dtype[np.unsignedinteger]) -> int:
    """Return how many ids a unit has."""
    return (unit.stop - unit.start) // dtype.itemsize


def _outside(path: Path, at: int, value: int, vocab_size: int, form: Form) -> Problem:
    remedy = "name the tokenizer that made the file, data.tokenizer=NAME"
    if not form.start:
        other = "uint32" if form.dtype.itemsize == 2 else "uint16"
        remedy += f"; or data.headerless={other}, if its ids are of {other[4:]} bits"
    cause = f"{path}: the id at place {at:,}, counted from 0, is {value:,}, and data.tokenizer has {vocab_size:,} ids"
    return Problem(cause, remedy)


def _unfit(path: Path, why: str, remedy: str) -> UserError:
    return UserError.of(f"{path} {why}", remedy)


def _is_other_header(head: bytes) -> bool:
    """Return whether bytes begin as llm.c's other files do: a date as a number, few more, and zeros to the end."""
    if len(head) < HEADER_BYTES:
        return False
    (magic,) = struct.unpack("<i", head[:4])
    return 2020_00_00 <= magic <= 2039_99_99 and not head[256:].strip(b"\0")


def _check_first(path: Path, form: Form) -> None:
    """Look at the first ids. Raises UserError for zeros, for other kinds of file, and for ids of another width."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES + form.start)[form.start :]
    for mark, (what, remedy) in _marks():
        if not form.start and head.startswith(mark):
            raise _unfit(path, f"has no token ids: it is {what}", f"{remedy}; or leave it out")
    if len(head) < _ENOUGH:
        return
    if not head.strip(b"\0"):
        raise _unfit(path, f"has only zeros in its first {len(head):,} bytes", _CUT_SHORT)
    if not form.start and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        remedy = "data=text_files reads text, in files that end in .txt; or leave it out"
        raise _unfit(path, "has no token ids: it is text", remedy)
    for bits, remedy in ((64, "write them again by astype('<u2') or astype('<u4')"), (32, "data.headerless=uint32")):
        ids = np.frombuffer(head[: len(head) // 8 * 8], f"<u{bits // 8}")
        if (
            not form.start
            and 8 * form.dtype.itemsize < bits
            and ids.max() < 3 << 16
            and len(np.unique(ids % 65536)) > 3
        ):
            raise _unfit(path, f"has ids of {bits} bits: as {form.dtype.name} only one in "
                         f"{bits // 8 // form.dtype.itemsize} would not be 0, 1 or 2", remedy)  # fmt: skip


def _marks() -> Iterator[tuple[bytes, tuple[str, str]]]:
    """Yield the first bytes of other kinds of file. Two bytes may be an id, so only longer ones count."""
    yield b"\x93NUMPY", ("a NumPy file", "write its ids by array.astype('<u2').tofile(PATH)")
    yield from ((mark, said) for mark, said in file_check.MARKS.items() if len(mark) >= 4)
