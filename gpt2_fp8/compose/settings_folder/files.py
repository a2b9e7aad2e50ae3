"""The files of a user's settings folder (`-cd FOLDER` or `hydra.searchpath`), which may be a stranger's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpt2_fp8.compose.settings_folder import contents, defaults_list, yaml_nodes
from gpt2_fp8.config import globs
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.shown import line, printable

_MOST_FILES = 500  # files of settings in a folder
_MOST_BYTES = 1 << 18  # bytes in all of them
_MOST_ENTRIES = 20_000  # files and folders of any kind, except hidden ones at the top


class _TooMuchError(Exception):
    """A folder has more than settings have."""


class Own(NamedTuple):
    """What can be chosen: this program's groups by name, and Hydra's installed plug-ins."""

    groups: set[str]
    options: defaults_list.Options


def problems(folder: Path, own: Own) -> list[Problem]:
    """Report what is refused in a folder, file by file. If nothing is, Hydra may read it.

    Checked are the files at the top, the groups, and other folders that a defaults list names. Nothing else can be
    chosen. So a checkout can be a settings folder too.
    """
    found = []
    left = _MOST_BYTES
    groups, read = {*own.groups, "hydra"}, set[Path]()
    try:
        while files := [file for file in _files(folder, groups) if file not in read]:
            for file in files:
                data, reason = _read(file, left)
                left -= len(data)
                problem, named = _problem(folder, file, data, reason, own.options)
                found += [problem] if problem else []
                groups |= named
            read |= {*files}
    except _TooMuchError as error:
        remedy = "-cd FOLDER, with a folder that holds settings and nothing else"
        found.append(Problem(f"{printable(str(folder))} has {error}, too much for settings", remedy))
    except OSError as error:
        found.append(Problem(f"{printable(str(folder))} cannot be read: {error.strerror}", "correct -cd FOLDER"))
    return found


def place_of(folder: Path, groups: set[str], key: str) -> str | None:
    """Return the file and line that give a key its value; None if there is none.

    Nothing in the folder may be refused.
    """
    for file in _files(folder, groups):
        with suppress(ValueError):  # the file is in a folder from which nothing was chosen
            _, documents = yaml_nodes.read(file.read_bytes())
            if (number := contents.line_of(documents, key)) is not None:
                return f"{file}, line {number},"
    return None


def _problem(
    folder: Path, file: Path, data: bytes, reason: str | None, options: defaults_list.Options
) -> tuple[Problem | None, set[str]]:
    """Return what is wrong with a file, and the folders that its defaults list names.

    `reason` says why the file could not be read, or is None.
    """
    shown = printable(str(file))
    if reason is None:
        try:
            text, documents = yaml_nodes.read(data)
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        return Problem(f"{shown} cannot be read: {reason}", "correct the file, or take it out"), set()
    refusal = contents.refused(text, documents) or defaults_list.refused(documents, options)
    if file.relative_to(folder).parts[0] == "hydra":
        refusal = contents.Refusal("settings of Hydra's own", contents.CODE)
    if refusal:
        cause = f"{shown} holds {refusal.what}, {refusal.why}"
        remedy = refusal.remedy or "correct the file, or leave out -cd"
        if refusal.why in contents.FOR_THE_COMMAND_LINE:
            remedy = "take it out, or leave out -cd; code, the environment and hydra.* are for the command line"
        return Problem(line(cause), remedy), set()
    if not str(file.relative_to(folder)).isprintable():
        return Problem(f"{shown}: its name has control characters, and --help would show it", "rename it"), set()
    return None, defaults_list.groups_of(documents)


def _files(folder: Path, groups: set[str]) -> Iterator[Path]:
    """Yield the files that Hydra takes for settings, each folder once, even if links form a circle.

    Of the folders at the top, only those of `groups` are entered.
    """
    left, seen, files, entries = [folder], set(), 0, 0
    while left:
        below = left.pop()
        about = below.stat()
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        for entry in sorted(os.scandir(below), key=lambda entry: entry.name):
            if below == folder and entry.name.startswith("."):  # such as .git: no choice can name it
                continue
            entries += 1
            files += entry.name.endswith((".yaml", ".yml"))
            if entries > _MOST_ENTRIES or files > _MOST_FILES:
                many = f"{_MOST_FILES:,} files of settings" if files > _MOST_FILES else f"{_MOST_ENTRIES:,} files"
                raise _TooMuchError(f"more than {many}")
            if entry.name.endswith((".yaml", ".yml")):
                yield below / entry.name
            elif (below != folder or entry.name in groups) and globs.is_folder(entry):
                left.append(below / entry.name)


def _read(file: Path, left: int) -> tuple[bytes, str | None]:
    """Return a file's content, or why it is no file of settings.

    Only regular files are opened: a pipe would wait forever.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return b"", error.strerror
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b"", "it is no regular file"
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(contents.LARGEST + 1)
    finally:
        os.close(descriptor)
    if len(data) > contents.LARGEST:
        return b"", f"it has more than {contents.LARGEST:,} bytes"
    if len(data) > left:
        raise _TooMuchError(f"more than {_MOST_BYTES:,} bytes of settings")
    return data, None
