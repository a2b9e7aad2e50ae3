"""Local files: which ones exist, what is wrong with them, and which part of them is held out."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.data import file_check, formats
from gpt2_fp8.data.progress_log import ProgressLog
from gpt2_fp8.data.retry import LOCAL_WAITS
from gpt2_fp8.data.units import Corpus, DocumentCounts, TextFile, Unit

log = logging.getLogger(__name__)

ALL_HELD_OUT = Problem(
    "data.val_files takes every file of data.train_files that is not empty", "leave some to train on"
)


@dataclass
class FilesSource:
    """Files by path or glob (`**` enters folders). The ending of a file's name gives its format (see `formats`).

    Without `val_files`, `val_fraction` is held out. Of a .txt that is its tail. Of the others it is the documents whose
    hash falls into the fraction. Exact copies are then on the same side, in any order of the files.
    """

    train_files: list[str]
    val_files: list[str]
    val_fraction: float
    text_column: str = "text"
    waits: tuple[float, ...] = LOCAL_WAITS

    def corpus(self) -> Corpus:
        """Return the units of all files, in the order of the patterns and of the sorted names within each.

        Empty files are skipped, and logged.

        Raises:
            UserError: every pattern without a match, every name with control characters, every unknown ending, and
                every file without a text column.
        """
        problems: list[Problem] = []
        train, val = both_sides(self.train_files, self.val_files, formats.ENDINGS, problems)
        looking = ProgressLog("looking into files", len(train) + len(val))
        for done, path in enumerate([*train, *val]):
            looking.at(done)
            problems += file_check.problems(path, self.text_column)
        if val and not train and not problems:
            problems.append(ALL_HELD_OUT)
        if problems:
            raise UserError(problems)
        about: dict[str, str | int] = {"kind": "files", "files": len(train) + len(val)}
        if val:
            return Corpus(_whole(train), _whole(val), about)
        if self.val_fraction == 0:
            return Corpus(_whole(train), [], about)
        parts = [formats.held_out(path, self.val_fraction) for path in _each(train)]
        return Corpus([u for t, _ in parts for u in t], [u for _, v in parts for u in v], about)

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[object]:
        """Return the unit's documents."""
        return formats.read(unit, self.text_column, counts)

    def is_current(self, unit: Unit) -> bool:
        """Return whether the file has the size and modification time that it had at the start."""
        return unit.version.startswith(TextFile.local(unit.path).version)


def both_sides(
    train_files: list[str], val_files: list[str], kinds: tuple[str, ...], problems: list[Problem]
) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those to validate with, each once, without empty ones (which are logged).

    Without any to train on, which no run may have, an evaluation looks at the others in their place. `kinds` are the
    endings of their names. What is wrong with the patterns is added to `problems`.
    """
    if not train_files and not val_files:
        problems.append(
            Problem("data.train_files is empty", f"name your files: data.train_files='[/corpus/*{kinds[-1]}]'")
        )
    held_out = _resolve(val_files, kinds, problems)
    val = list(held_out.values())
    train = [path for real, path in _resolve(train_files, kinds, problems).items() if real not in held_out]
    return (train, val) if train_files else (val, val)


def _resolve(patterns: list[str], kinds: tuple[str, ...], problems: list[Problem]) -> dict[str, Path]:
    """Return the files that `patterns` name, each once, as it is named first; by their real paths."""
    found: dict[str, Path] = {}
    for pattern in patterns:
        matches = disk.find(pattern)
        reasons = {path: reason for path in matches if (reason := disk.why_unreadable(path))}
        named = [path for path in matches if not str(path).isprintable()]
        files = [path for path in matches if path not in reasons]
        if not matches:
            what = "glob matches no file" if glob.has_magic(pattern) else "file does not exist"
            problems.append(Problem(f"{what}: {show(pattern)} (from {Path.cwd()})", "correct the path"))
        elif named:
            problems.append(Problem(str(disk.why_unreadable(named[0])), "rename the file, or leave it out"))
        elif not files:
            problems.append(Problem(reasons[matches[0]], "name files that hold the text"))
        for path in files:
            found.setdefault(disk.real_path(path), path)
    empty = {path: None for path in found.values() if path.stat().st_size == 0 and path.name.lower().endswith(kinds)}
    if empty:
        first = ", ".join(map(str, [*empty][:5]))
        log.warning("data: %d files are empty and are skipped: %s", len(empty), first)
    return {real: path for real, path in found.items() if path not in empty}


def _whole(paths: list[Path]) -> list[Unit]:
    return [unit for path in _each(paths) for unit in formats.units(path)]


def _each(paths: list[Path]) -> Iterator[Path]:
    looking = ProgressLog("cutting files into units", len(paths))
    for done, path in enumerate(paths):
        looking.at(done)
        yield path
