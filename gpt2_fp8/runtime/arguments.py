"""The command lines of programs that argparse reads: what is wrong with one is said as everywhere, in two lines."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from gpt2_fp8.config.errors import Problem, UserError

_KEYED = re.compile(r"[a-z_.]+=(.+)")


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError, with cause and remedy, where argparse would print its usage and end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.flags: list[str] = []
        super().__init__(*args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument, and remember its flags."""
        action = super().add_argument(*args, **kwargs)
        self.flags += action.option_strings
        return action

    def error(self, message: str) -> NoReturn:
        """Raise UserError. A flag that is none leads to the one that looks like it."""
        typed = [word.partition("=")[0] for word in message.split() if word.startswith("-")]
        wrong = [word for word in typed if word.rstrip(":") not in self.flags]
        near = [flag for word in wrong for flag in difflib.get_close_matches(word, self.flags, n=1)]
        known = f"{self.prog} --help shows what it takes"
        raise UserError.of(message, f"did you mean {near[0]}? ({known})" if near else known)


def plain_words(program: str, words: Sequence[str | os.PathLike[str]]) -> Problem | None:
    """Return what is wrong with words such as `ckpt_path=outputs/first`, where paths stand alone; None: nothing is."""
    typed = [os.fspath(word) for word in words]
    keyed = {word: match[1] for word in typed if (match := _KEYED.fullmatch(word)) and not os.path.lexists(word)}
    if not keyed:
        return None
    meant = shlex.join([*program.split(), *(keyed.get(word, word) for word in typed)])
    return Problem(f"{' '.join(keyed)}: paths are plain words here, without a key", meant)
