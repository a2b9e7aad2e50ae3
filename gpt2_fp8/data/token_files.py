"""Files of token ids (.bin): what their headers say, their units and their ids.

- nanoGPT: no header, ids of 16 bits.
- llm.c, modded-nanogpt: 256 int32 (magic 20240520, version 1, number of ids), then ids of 16 bits.
- llm.c for Llama 3: the same with magic 20240801 and version 7, then ids of 32 bits.

All of it is little-endian. Sources: nanoGPT's `data/openwebtext/prepare.py`, llm.c's `dev/data/data_common.py`.
The first two bytes of both magic numbers would be an id above GPT-2's largest, so no file of GPT-2's ids begins so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_fp8.config.data_schema import LLAMA_3, LLM_C
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data import formats
from gpt2_fp8.data.files import find_files
from gpt2_fp8.data.units import LOCAL_WAITS, Corpus, TextFile, Tokens, Unit, dtype_of

ENDING = ".bin"
HEADER_BYTES = 1024
UNIT_IDS = 2 << 20  # about the tokens of a unit of text
_KINDS = {LLM_C: (1, "uint16"), LLAMA_3: (7, "uint32")}  # magic: version, ids
_HEAD_BYTES = 8192


class Form(NamedTuple):
    """Where a file's ids are, and of which dtype they are on disk."""

    dtype: np.dtype[np.unsignedinteger]
    start: int  # bytes of header
    size: int  # bytes of the file


@dataclass
class TokenFilesSource:
    """Files by path or glob. A unit is a range of a file, and its ids stay in order.

    `headerless`: the dtype of the ids of files without a header, `uint16` or `uint32`.
    """

    train_files: list[str]
    val_files: list[str]
    headerless: str
    waits: tuple[float, ...] = LOCAL_WAITS

    def corpus(self) -> Corpus:
        """Return the units of all files, in the order of the patterns and of the sorted names within each.

        Raises UserError: every pattern without a match, and every file that is none of token ids.
        """
        train, val = find_files(self.train_files, self.val_files, (ENDING,), self._find_problems)
        about: dict[str, str | int] = {"kind": "token_files", "files": len(train) + len(val)}
        whole = [[unit for path in paths for unit in self._cut_units(path)] for paths in (train, val)]
        return Corpus(whole[0], whole[1], about)

    def read_ids(self, unit: Unit, vocab_size: int) -> Tokens:
        """Return the unit's ids, [n], in the dtype of the vocabulary. Raises UserError for an id outside of it."""
        path = Path(unit.path)
        form = read_form(path, self.headerless)
        wanted = (unit.stop - unit.start) // form.dtype.itemsize
        ids = np.fromfile(path, form.dtype, wanted, offset=unit.start)
        if len(ids) < wanted:
            raise UserError.of(f"{path} has become shorter: {printable(unit.name)} is not all there")
        if len(odd := np.flatnonzero(ids >= vocab_size)):
            at = (unit.start - form.start) // form.dtype.itemsize + int(odd[0])
            raise UserError.of(
                f"{path}: the id at place {at:,}, counted from 0, is {ids[odd[0]]:,}, and data.tokenizer has "
                f"{vocab_size:,} ids",
                "name the tokenizer that made the file, data.tokenizer=NAME; without a header, data.headerless",
            )
        return ids.astype(dtype_of(vocab_size), copy=False)

    def count(self, unit: Unit) -> int:
        """Return how many ids the unit has."""
        return (unit.stop - unit.start) // read_form(Path(unit.path), self.headerless).dtype.itemsize

    def _cut_units(self, path: Path) -> list[Unit]:
        """Cut a file into ranges of about `UNIT_IDS` ids."""
        form = read_form(path, self.headerless)
        step = UNIT_IDS * form.dtype.itemsize
        cuts = [form.start, *range(form.start + step, form.size - step // 2, step), form.size]
        about, kind = TextFile.local(path).version, form.dtype.name
        return [Unit(f"{path.name} {form.size} {kind} [{a}:{b}]", str(path), a, b, about) for a, b in pairwise(cuts)]

    def _find_problems(self, path: Path) -> list[Problem]:
        """Return what is wrong with a file, by its size and its first bytes: 16 bits may be half of an id."""
        try:
            form = read_form(path, self.headerless)
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except UserError as error:
            return error.problems
        except OSError as error:
            return formats.unreadable(path, error).problems
        for bits in (64, 32):
            ids = np.frombuffer(head[: len(head) // 8 * 8], f"<u{bits // 8}")
            if form.start or 8 * form.dtype.itemsize >= bits or len(ids) < 8:
                continue
            if ids.max() < 3 << 16 and len(np.unique(ids % 65536)) > 3:
                return [Problem(f"{path} has ids of {bits} bits, not {form.dtype.name}: see data.headerless")]
        return []


def read_form(path: Path, headerless: str) -> Form:
    """Read a file's header. `headerless`: the dtype of its ids if it has none.

    Raises UserError for a header that does not fit the file, and OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, count = struct.unpack("<3i", head.ljust(12, b"\0"))
    if magic not in _KINDS:
        form = Form(np.dtype(headerless).newbyteorder("<"), 0, size)
        if size % form.dtype.itemsize:
            raise UserError.of(f"{path} has {size:,} bytes, which are no whole number of {headerless} ids")
        return form
    known, name = _KINDS[magic]
    if version != known:
        raise UserError.of(f"{path} has the magic number {magic} with version {version}, which is unknown")
    form = Form(np.dtype(name).newbyteorder("<"), HEADER_BYTES, size)
    there = max(0, size - HEADER_BYTES)
    if count < 1 or there != count * form.dtype.itemsize:
        raise UserError.of(f"{path} has a header of {count:,} {name} ids, and {there:,} bytes after it")
    return form
