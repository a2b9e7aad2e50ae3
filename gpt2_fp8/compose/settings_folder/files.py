"""The files of a user's settings folder (`-cd FOLDER` or `hydra.searchpath`), which may be a stranger's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.compose.settings_folder import contents, defaults_list, yaml_nodes
from gpt2_fp8.compose.settings_folder.defaults_list import Options
from gpt2_fp8.config import globs
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.shown import line, printable

_MOST_FILES = 500  # files of settings in a folder
_MOST_BYTES = 1 << 18  # bytes in all of them
_MOST_ENTRIES = 20_000  # files and folders of any kind, except hidden ones at the top


class _TooMuchError(Exception):
    """A folder has more than settings have."""


def problems(folder: Path, groups: set[str], options: Options) -> list[Problem]:
    """Report what is refused in a folder, file by file. If nothing is, Hydra may read it.

    `groups` names this program's groups. `options` lists the installed plug-ins of a group of Hydra's.
    Checked are the files at the top, the groups, and other folders that a defaults list names. Nothing else can be
    chosen. So a checkout can be a settings folder too.
    """
    found = []
    left = _MOST_BYTES
    groups, read = {*groups, "hydra"}, set[Path]()
    try:
        while files := [file for file in _files(folder, groups) if file not in read]:
            for file in files:
                try:
                    data = _read(file, left)
                    left -= len(data)
                    text, documents = yaml_nodes.read(data)
                except ValueError as error:
                    cause = f"{printable(str(file))} cannot be read: {error}"
                    found.append(Problem(cause, "correct the file, or take it out"))
                    continue
                if refusal := _refusal(folder, file, text, documents, options):
                    found.append(refusal)
                else:
                    groups |= defaults_list.groups_of(documents)
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


def _refusal(folder: Path, file: Path, text: str, documents: list[yaml.Node], options: Options) -> Problem | None:
    """Return why a file that could be read is refused, or None."""
    shown = printable(str(file))
    refusal = contents.refused(text, documents) or defaults_list.refused(documents, options)
    if file.relative_to(folder).parts[0] == "hydra":
        refusal = contents.Refusal("settings of Hydra's own", contents.CODE)
    if refusal:
        cause = f"{shown} holds {refusal.what}, {refusal.why}"
        remedy = refusal.remedy or "correct the file, or leave out -cd"
        if refusal.why in contents.FOR_THE_COMMAND_LINE:
            remedy = "take it out, or leave out -cd; code, the environment and hydra.* are for the command line"
        return Problem(line(cause), remedy)
    if not str(file.relative_to(folder)).isprintable():
        return Problem(f"{shown}: its name has control characters, and --help would show it", "rename it")
    return None


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


def _read(file: Path, left: int) -> bytes:
    """Return a file's content. Raises ValueError with the reason if it is no file of settings.

    Only regular files are read: a pipe would wait forever. Raises _TooMuchError beyond `left` bytes.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(error.strerror) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(contents.LARGEST + 1)
    finally:
        os.close(descriptor)
    if len(data) > contents.LARGEST:
        raise ValueError(f"it has more than {contents.LARGEST:,} bytes")
    if len(data) > left:
        raise _TooMuchError(f"more than {_MOST_BYTES:,} bytes of settings")
    return data
