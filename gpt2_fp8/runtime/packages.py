"""Packages that this Python lacks, as on a node where the environment was not activated. Standard library only."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt2_fp8.config.errors import Problem, RunError, UserError
from gpt2_fp8.config.shown import line

_OWN = "gpt2_fp8"


class NotInstalled(RunError):
    """A package is missing. It is no UserError: other nodes may have it, and the first process of each says it."""

    exit_code = UserError.exit_code
    status = UserError.status


@contextmanager
def needed() -> Iterator[None]:
    """Raise NotInstalled if what is imported here lacks a package of somebody else's."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", _OWN):
            raise
        cause = line(f"{sys.executable} has no package {name}")
        raise NotInstalled(str(Problem(cause, line(_remedy())))) from error


def _remedy() -> str:
    folder = Path(__file__).resolve().parents[2]
    what = ["-e", str(folder)] if (folder / "pyproject.toml").is_file() else [_OWN]
    install = shlex.join([sys.executable, "-m", "pip", "install", *what])
    return f"activate the environment in which {_OWN} is installed, on every node; or {install}"
