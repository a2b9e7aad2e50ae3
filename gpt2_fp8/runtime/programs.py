"""The programs of this package, found in its folder: each file beside the packages is one. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpt2_fp8 import __version__

VERSION = f"gpt2_fp8 {__version__}"
_FOLDER = Path(__file__).resolve().parents[1]


class Program(NamedTuple):
    """A program: its name, and what it does, by the first line of its docstring."""

    name: str
    about: str

    @property
    def command(self) -> str:
        """Return how it is typed."""
        return f"python -m gpt2_fp8.{self.name}"


def names(folder: Path = _FOLDER) -> list[str]:
    """Return the programs' names: `run`, which trains, before the others. No program is imported."""
    found = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    return sorted(found, key=lambda name: name != "run")


def table(folder: Path = _FOLDER) -> list[Program]:
    """Return the programs with what they do. Their files are read, and not run."""
    return [Program(name, _about(folder / f"{name}.py")) for name in names(folder)]


def asks_version(argv: list[str]) -> bool:
    """Return whether a command line asks for the version."""
    return "--version" in argv[: argv.index("--") if "--" in argv else None]


def answered(argv: list[str], help_text: Callable[[], str]) -> bool:
    """Print the version or the help if a command line asks for one; returns whether it did."""
    if asks_version(argv):
        print(VERSION)
    elif {"-h", "--help"} & set(argv):
        print(help_text())
    else:
        return False
    return True


def _about(path: Path) -> str:
    lines = (ast.get_docstring(ast.parse(path.read_bytes())) or "").splitlines()
    return lines[0] if lines else ""
