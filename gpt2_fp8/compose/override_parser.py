"""The words of a command line as Hydra's overrides (`key=value`, `group=choice`).

Hydra stops at the first word that it cannot parse. Here each such word becomes a problem, and the others are parsed.
"""

from __future__ import annotations

import itertools
import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gpt2_fp8.compose.commandline import RUN, Program
from gpt2_fp8.config import hf_check, hints, trained_folder, typed
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.shown import line, shortened
from gpt2_fp8.runtime import programs

_LONG_WORD = 500  # characters; a longer word is not repeated in a message
_CLOSING = {"[": "]", "{": "}"}


@lru_cache(maxsize=4096)  # a sweep's jobs repeat most of their words
def parsed(word: str) -> Override:
    """Parse one override.

    Raises HydraException, or for a huge value ValueError, OverflowError or RecursionError.
    """
    return OverridesParser.create().parse_override(word)


def parse(
    words: list[str], loader: Any, program: Program = RUN, multirun: bool = False
) -> tuple[list[Override], list[Problem]]:
    """Return the words that are overrides, and what is wrong with the others.

    Hydra asks `loader` what `glob(...)` matches. `multirun`: commas separate the values of jobs.
    """
    overrides, problems, place = [], [], 0
    while place < len(words):
        split = _split_by_blanks(words[place:])
        if split:
            problem, length = split
            problems.append(problem)
            place += length
            continue
        override = _parse_one(words[place], program, multirun)
        if isinstance(override, Problem):
            problems.append(override)
        else:
            override.config_loader = loader
            overrides.append(override)
        place += 1
    return overrides, problems


def _split_by_blanks(words: list[str]) -> tuple[Problem, int] | None:
    """Return how many words are one override that the shell has split, and the problem; None if it is whole.

    Examples are `key = value`, `key: value` and `key={a: 1}`.
    """
    first, second = words[0], words[1:2]
    if "=" not in first and second == ["="]:
        whole = " ".join(words[:3])
        return Problem(f"{whole}: blanks around =", f"{first}={' '.join(words[2:3])}"), len(words[:3])
    if "=" not in first and first.endswith(":") and second:
        return Problem(f"{first} {second[0]}: not of the form key=value", f"{first[:-1]}={second[0]}"), 2
    opening = first.partition("=")[2][:1]
    if (closing := _CLOSING.get(opening)) and closing not in first:
        for length in range(2, len(words) + 1):
            if closing in words[length - 1]:
                whole = " ".join(words[:length])
                key, _, value = whole.partition("=")
                remedy = f"quote the whole: {typed.word(key, value) if _is_refused(whole) else shlex.quote(whole)}"
                return Problem(f"{whole}: the shell split it at the blanks", remedy), length
    after = []
    for word, following in itertools.pairwise([*words[1:], ""]):
        if "=" in word or word.startswith("~") or word.endswith(":") or following == "=":
            break
        after.append(word)
    if "=" in first and after:
        key, _, value = first.partition("=")
        text = " ".join([value, *after])
        cause = f"{' '.join(after)} stands alone, after {first}: the shell splits at blanks"
        return Problem(cause, f"if they are one value, quote it: {typed.word(key, text)}"), 1 + len(after)
    return None


def _parse_one(word: str, program: Program, multirun: bool) -> Override | Problem:
    key, equals, value = word.partition("=")
    if re.search("[\ud800-\udfff]", word):  # Python's mark of bytes that are not UTF-8
        return Problem(f"{word} has bytes that are no UTF-8", "type it in UTF-8; `locale` says what the terminal sends")
    if not equals:
        if word.startswith("~"):
            try:
                return parsed(word)
            except HydraException:
                return Problem(f"{word} cannot be read", "~KEY leaves a group out: ~experiment")
        return Problem(f"{word} is not of the form key=value", _without_value(word, program))
    if key != key.strip() or value != value.lstrip():
        return Problem(f"{word!r} has blanks around the key", f"{key.strip()}={value.strip()}")
    try:
        override = parsed(word)
    except (HydraException, ValueError, OverflowError, RecursionError) as error:  # a number of 5000 digits, [[[[...
        reason = " ".join(str(error).split()).partition(" expecting {")[0]
        if len(word) > _LONG_WORD:
            return Problem(f"{shortened(word, 100)} cannot be read: {shortened(reason, 200)}", "give a shorter value")
        return Problem(f"{word} cannot be read: {reason}", _stray(key, value) or _quoting(key, value, multirun))
    return override if override.key_or_group else Problem(f"{word} has no key in front of =", "key=value")


def _stray(key: str, value: str) -> str | None:
    """Return the word without a comma or = too much, if it is then read; `model==gpt2`, `optim.lr=3e-4,`."""
    word = f"{key}={value.strip(',=')}"
    return word if value.strip(",=") not in ("", value) and not _is_refused(word) else None


def _is_refused(word: str) -> bool:
    """Return whether Hydra cannot read a word."""
    try:
        parsed(word)
    except (HydraException, ValueError, OverflowError, RecursionError):
        return True
    return False


def _without_value(word: str, program: Program) -> str:
    """Return what to type for a word that is no override."""
    path, colon, rest = word.partition(":")
    if colon:
        return f"{path}={rest}"
    if word == "help":
        return f"{program.command} --help"
    if word == "train":
        return "leave it out: a run trains"
    if word in programs.names():
        return f"python -m gpt2_fp8.{word} is a program of its own"
    return _of_a_path(word, program) or f"give it a value: {word}=VALUE; {program.command} --help shows how"


def _of_a_path(word: str, program: Program) -> str | None:
    """Return what to type for a word that names a folder of weights, or a text; None if it is none of them."""
    path = Path(word).expanduser()
    if "\0" in word or not path.exists():
        return None
    if hf_check.is_folder(path):
        return f"init_from={word}" if program == RUN else trained_folder.from_hugging_face(word)
    if program == RUN and trained_folder.is_run(path) and (newest := trained_folder.newest(path)):
        return f"ckpt_path={Path(word, 'checkpoints', newest.name)}"
    if found := trained_folder.as_setting(word):
        return found
    return hints.as_files(word) if program == RUN and path.is_file() else None


def _quoting(key: str, value: str, multirun: bool) -> str:
    if (closing := _CLOSING.get(value[:1])) and value.count(value[0]) != value.count(closing):
        whole = f"{key}={value}{closing}"
        word = typed.word(key, value + closing) if _is_refused(whole) else f"'{whole}'"
        return f"close the bracket, and quote the whole for the shell: {word}"
    if _is_refused(f"{key}=1"):
        return (
            f"keys have only letters of the alphabet from a to z, digits, _ and dots; {RUN.command} --help shows them"
        )
    word = typed.word(key, value, multirun)
    if _is_refused(shlex.split(word)[0]):  # {a}, {~: 1}
        word = shlex.quote(f"{key}={typed.quoted(value)}")
    if line(word) != word:  # what cannot be shown cannot be repeated
        word = f"'{key}=\"...\"'"
    return f"quote the value for Hydra and the whole for the shell: {word}"
