"""A way out that chooses another precision is tried with the other words, and not proposed if it is refused with them.

Keys of one precision alone stand beside such a choice, typed or in an experiment's file, and only composing tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from hydra.core.override_parser.types import Override

from gpt2_fp8.compose.override_parser import parsed
from gpt2_fp8.config.errors import Problem

_CHOICE = re.compile(r"(?:choose )?(precision=\w+(?: precision\.\w+=\w+)*)")
Check = Callable[[Sequence[Override]], Iterable[Problem]]


def tried(problems: list[Problem], words: Sequence[Override], check: Check) -> list[Problem]:
    """Return the problems of `words` without ways out that make new ones; of each problem one way stays.

    `check` returns the problems of other words.
    """
    known = {problem.cause for problem in problems}
    goes = cache(lambda choice: _goes_with(choice, known, words, check))  # several problems may have the same way out
    return [Problem(cause, _remedy(remedy, goes)) for cause, remedy in problems]


def _remedy(remedy: str, goes: Callable[[str], bool]) -> str:
    ways = remedy.split(", or ")
    left = [way for way in ways if not (choice := _CHOICE.fullmatch(way)) or goes(choice[1])]
    return ", or ".join(left or ways)


def _goes_with(choice: str, known: set[str], words: Sequence[Override], check: Check) -> bool:
    new = [parsed(word) for word in choice.split()]
    keys = {word.key_or_group for word in new}
    left = check([*(word for word in words if word.key_or_group not in keys), *new])
    return {problem.cause for problem in left} <= known
