"""Local files: of text, of token ids, and Python's own source.

Files of ids (.bin), all of it little-endian:

- nanoGPT: no header, ids of 16 bits.
- llm.c, modded-nanogpt: 256 int32 (magic 20240520, version 1, number of ids), then ids of 16 bits.
- llm.c for Llama 3: the same with magic 20240801 and version 7, then ids of 32 bits.

Sources: nanoGPT's `data/openwebtext/prepare.py`, llm.c's `dev/data/data_common.py`.
The first two bytes of both magic numbers would be an id above GPT-2's largest, so no file of GPT-2's ids begins so.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_fp8.config import text_files
from gpt2_fp8.config.data_schema import LLAMA_3, LLM_C
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data import formats
from gpt2_fp8.data.formats import TextFile
from gpt2_fp8.data.tokenizer import Tokens, dtype_of
from gpt2_fp8.data.units import LOCAL_WAITS, Corpus, DocumentCounts, Unit

log = logging.getLogger(__name__)

HEADER_BYTES = 1024
UNIT_IDS = 2 << 20  # about the tokens of a unit of text
_KINDS = {LLM_C: (1, "uint16"), LLAMA_3: (7, "uint32")}  # magic: version, ids
_HEAD_BYTES = 4096  # that show whether a file is what its name says


def find_files(
    train: list[str], val: list[str], kinds: tuple[str, ...], check: Callable[[Path], None]
) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those to validate with, each once, without empty ones.

    Without any to train on, as in an evaluation, the others take their place. `kinds` are of `config.text_files`.
    Raises UserError with everything that is wrong with patterns, names and, by `check`, with files.
    """
    problems: list[Problem] = []
    if not train and not val:
        problems.append(Problem("data.train_files is empty"))
    held_out = _resolve(text_files.find_all("data.val_files", val, kinds, problems))
    found = _resolve(text_files.find_all("data.train_files", train, kinds, problems))
    rest = [path for real, path in found.items() if real not in held_out]
    if train and held_out and not rest and not problems:
        problems.append(Problem("data.val_files takes every file of data.train_files that is not empty"))
    for path in [*rest, *held_out.values()]:
        try:
            check(path)
        except UserError as error:
            problems += error.problems
        except OSError as error:
            problems += formats.unreadable(path, error).problems
    if problems:
        raise UserError(problems)
    return (rest if train else [*held_out.values()]), [*held_out.values()]


def _resolve(paths: list[Path]) -> dict[str, Path]:
    """Return the files that are not empty, each once, as it is named first; by their real paths."""
    found: dict[str, Path] = {}
    for path in paths:
        found.setdefault(str(path.resolve()), path)
    empty = {path for path in found.values() if path.stat().st_size == 0}
    if empty:
        log.warning("data: %d files are empty and are skipped, such as %s", len(empty), min(empty))
    return {real: path for real, path in found.items() if path not in empty}


@dataclass
class FilesSource:
    """Files of text by path, folder or glob. A name's ending gives the format (see `formats`).

    Without `val_files`, `val_fraction` is held out: of a .txt its tail, of others the documents whose hash falls into
    the fraction. Exact copies are then on the same side.
    """

    train_files: list[str]
    val_files: list[str]
    val_fraction: float
    text_column: str = "text"
    waits: tuple[float, ...] = LOCAL_WAITS

    def corpus(self) -> Corpus:
        """Return the units of all files, in the order of the patterns and of the sorted names within each."""
        train, val = find_files(self.train_files, self.val_files, text_files.OF_TEXT, self._check)
        about: dict[str, str | int] = {"kind": "files", "files": len(train) + len(val)}
        if val or self.val_fraction == 0:
            whole = [[unit for path in paths for unit in formats.cut_units(path)] for paths in (train, val)]
            return Corpus(whole[0], whole[1], about)
        parts = [formats.cut_held_out(path, self.val_fraction) for path in train]
        return Corpus([u for t, _ in parts for u in t], [u for _, v in parts for u in v], about)

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[object]:
        """Return the unit's documents."""
        return formats.read_unit(unit, self.text_column, counts)

    def _check(self, path: Path) -> None:
        """Look at a file's first bytes or its footer."""
        kind, compression = text_files.kind_of(path) or ("", "")
        if not compression and kind not in ("parquet", "arrow"):
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            text = head.rstrip(b"\0")  # a file that was cut short by a crash ends in these
            if not text or text.count(0) * 8 > len(text):
                raise UserError.of(f"{path} is no text: its first bytes are NUL (as in UTF-16)", "convert it to UTF-8")
        if kind != "txt" or compression:
            with formats.content_errors(str(path)):
                formats.check_column(TextFile.local(path), self.text_column)


# ---- token ids -------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where a file's ids are, and of which dtype they are on disk."""

    dtype: np.dtype[np.unsignedinteger]
    start: int  # bytes of header
    size: int  # bytes of the file


@dataclass
class TokenFilesSource:
    """Files of ids by path or glob. A unit is a range of a file. `headerless`: the ids' dtype without a header."""

    train_files: list[str]
    val_files: list[str]
    headerless: str
    waits: tuple[float, ...] = LOCAL_WAITS

    def corpus(self) -> Corpus:
        """Return the units of all files, in the order of the patterns and of the sorted names within each."""
        train, val = find_files(self.train_files, self.val_files, text_files.OF_IDS, self._check)
        about: dict[str, str | int] = {"kind": "token_files", "files": len(train) + len(val)}
        whole = [[unit for path in paths for unit in self._cut_units(path)] for paths in (train, val)]
        return Corpus(whole[0], whole[1], about)

    def read_ids(self, unit: Unit, vocab_size: int) -> Tokens:
        """Return the unit's ids, [n], in the dtype of the vocabulary. Raises UserError for an id outside of it."""
        path = Path(unit.path)
        layout = read_layout(path, self.headerless)
        wanted = (unit.stop - unit.start) // layout.dtype.itemsize
        ids = np.fromfile(path, layout.dtype, wanted, offset=unit.start)
        if len(ids) < wanted:
            raise UserError.of(f"{path} has become shorter: {printable(unit.name)} is not all there")
        if len(odd := np.flatnonzero(ids >= vocab_size)):
            at = (unit.start - layout.start) // layout.dtype.itemsize + int(odd[0])
            raise UserError.of(
                f"{path}: the id at place {at:,}, counted from 0, is {ids[odd[0]]:,}, and data.tokenizer has "
                f"{vocab_size:,} ids",
                "name the tokenizer that made the file, data.tokenizer=NAME; without a header, data.headerless",
            )
        return ids.astype(dtype_of(vocab_size), copy=False)

    def count(self, unit: Unit) -> int:
        """Return how many ids the unit has."""
        return (unit.stop - unit.start) // read_layout(Path(unit.path), self.headerless).dtype.itemsize

    def _cut_units(self, path: Path) -> list[Unit]:
        """Cut a file into ranges of about `UNIT_IDS` ids."""
        layout = read_layout(path, self.headerless)
        step = UNIT_IDS * layout.dtype.itemsize
        cuts = [layout.start, *range(layout.start + step, layout.size - step // 2, step), layout.size]
        about, kind = TextFile.local(path).version, layout.dtype.name
        return [Unit(f"{path.name} {layout.size} {kind} [{a}:{b}]", str(path), a, b, about) for a, b in pairwise(cuts)]

    def _check(self, path: Path) -> None:
        """Look at a file's size and its first bytes: 16 bits may be half of an id."""
        layout = read_layout(path, self.headerless)
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        for bits in (64, 32):
            ids = np.frombuffer(head[: len(head) // 8 * 8], f"<u{bits // 8}")
            if layout.start or 8 * layout.dtype.itemsize >= bits or len(ids) < 8:
                continue
            if ids.max() < 3 << 16 and len(np.unique(ids % 65536)) > 3:
                raise UserError.of(f"{path} has ids of {bits} bits, not {layout.dtype.name}: see data.headerless")


def read_layout(path: Path, headerless: str) -> Layout:
    """Read a file's header. `headerless`: the dtype of its ids if it has none. Raises UserError if it does not fit."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, count = struct.unpack("<3i", head.ljust(12, b"\0"))
    if magic not in _KINDS:
        layout = Layout(np.dtype(headerless).newbyteorder("<"), 0, size)
        if size % layout.dtype.itemsize:
            raise UserError.of(f"{path} has {size:,} bytes, which are no whole number of {headerless} ids")
        return layout
    known, name = _KINDS[magic]
    if version != known:
        raise UserError.of(f"{path} has the magic number {magic} with version {version}, which is unknown")
    layout = Layout(np.dtype(name).newbyteorder("<"), HEADER_BYTES, size)
    there = max(0, size - HEADER_BYTES)
    if count < 1 or there != count * layout.dtype.itemsize:
        raise UserError.of(f"{path} has a header of {count:,} {name} ids, and {there:,} bytes after it")
    return layout


# ---- Python's library ------------------------------------------------------------------------------------------------

# Pure-Python modules that are in all of CPython 3.11 to 3.14, also in Debian's split packages.
TRAIN_MODULES = Path(__file__).with_name("stdlib_modules.txt").read_text().split()
VAL_MODULES = ["bisect.py", "difflib.py", "heapq.py", "mailbox.py", "statistics.py", "tarfile.py", "textwrap.py"]


@dataclass
class StdlibSource:
    """Python's standard library: about 3 MB of real text on every machine. A module is a unit."""

    folder: str = sysconfig.get_path("stdlib")
    waits: tuple[float, ...] = ()  # a local read that fails once fails again

    def corpus(self) -> Corpus:
        """Return one unit a module. Raises UserError if half of the modules or more are missing."""
        train, val = ([unit for name in names if (unit := self._unit(name))] for names in (TRAIN_MODULES, VAL_MODULES))
        missing = len(TRAIN_MODULES) + len(VAL_MODULES) - len(train) - len(val)
        if len(train) < len(TRAIN_MODULES) / 2 or not val:
            raise UserError.of(f"this Python has no source of its standard library in {self.folder}: {missing} modules "
                               "are missing", "use text of your own: data=text_files")  # fmt: skip
        if missing:
            log.info("data: %d modules are not part of this Python's library and are left out", missing)
        return Corpus(train, val, {"kind": "stdlib", "modules": len(train) + len(val)})

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[bytes]:
        """Return the module's source, as one document."""
        yield Path(unit.path).read_bytes()

    def _unit(self, name: str) -> Unit | None:
        path = Path(self.folder, name)
        if not path.is_file():
            return None
        content = hashlib.sha256(path.read_bytes()).hexdigest()[:16]  # differs between releases of Python
        return Unit(f"stdlib/{name}@{content}", str(path))
