"""A user's settings folder (`-cd FOLDER`, or one of `hydra.searchpath`), which may be a stranger's: what is in it."""

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

_MOST_FILES = 500  # of settings
_MOST_BYTES = 1 << 18  # in all of them
_MOST_ENTRIES = 20_000  # files and folders of any kind, hidden ones at the top left out


class _TooMuchError(Exception):
    """More than a folder of settings has."""


class Own(NamedTuple):
    """What of a folder can be chosen from: groups by name; and what Hydra has itself."""

    groups: set[str]
    options: defaults_list.Options


def problems(folder: Path, own: Own) -> list[Problem]:
    """What in a folder is refused, file by file; nothing, where Hydra may read it.

    Read are its own files, its groups, and whatever other folders their defaults lists name: nothing else can be
    chosen from it, so that a checkout is a folder of settings too.
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
    """The file and line of a folder, in which nothing is refused, that give a key its value; None: none does."""
    for file in _files(folder, groups):
        with suppress(ValueError):  # of another folder, that nothing was chosen from
            _, documents = yaml_nodes.read(file.read_bytes())
            if (number := contents.line_of(documents, key)) is not None:
                return f"{file}, line {number},"
    return None


def _problem(
    folder: Path, file: Path, data: bytes, reason: str | None, options: defaults_list.Options
) -> tuple[Problem | None, set[str]]:
    """What is wrong with a file, and the folders that its defaults list names. `reason`: why it could not be read."""
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
    """The files that Hydra takes for settings, each folder once, whatever links go round in circles.

    Of the folders at the top those of `groups`.
    """
    left, seen, files, entries = [folder], set(), 0, 0
    while left:
        below = left.pop()
        about = below.stat()
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        for entry in sorted(os.scandir(below), key=lambda entry: entry.name):
            if below == folder and entry.name.startswith("."):  # .git, .venv: no choice leads there
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
    """A file's content, or why it is no settings. Opens regular files alone: a pipe would wait for ever."""
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
