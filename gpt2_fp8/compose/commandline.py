"""A command line: its flags, as Hydra parses them, and its overrides (`key=value`, `group=choice`).

`generate`, `evaluate` and `bench` read theirs here too; the keys of their own are a dataclass each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.config import shown
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import is_text, key_named, meanings, show
from gpt2_fp8.config.schema import RunConfig


class Program(NamedTuple):
    """A program, and what its command line may have."""

    command: str  # as it is typed
    schema: type  # has its keys
    flags: tuple[str, ...] | None = None  # the flags of Hydra's that it takes, by argparse's name; None: all
    folder: str | None = None  # the key that a folder typed without one sets


MAY_BE_NULL = ("experiment", "debug")
SEVERAL = ("logger", *MAY_BE_NULL)  # groups of which a run may have several choices, as a list
_WITH_NONE = ("callbacks", "logger")  # the groups with a choice `none`
_HYDRAS_TEXTS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_ONE_OF = ("run", "multirun", "cfg", "info", "shell_completion")  # flags of which Hydra takes only one
_SHOW = ("help", "hydra_help", "cfg", "info", "shell_completion")  # flags that only ask to see something
_REFUSED = {  # flags, by argparse's name
    "config_path": "would hide this program's own settings (-cd FOLDER adds yours)",
    "experimental_rerun": "would unpickle a file",
}
_IN_QUOTES = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
# What Hydra reads as a number or a truth value, which are not typed so again, and a home folder, which it cannot read.
_NO_TEXT = r"~[^\[\],'\"]*|(?i:(?!-?\d+(?![\w.]))[+-]?(?:[\d_.]*\d[\d_.]*(?:e[+-]?[\d_]+)?|inf|nan)|true|false)"
_ITEM = re.compile(rf"(?s){_IN_QUOTES}|(^[^=]*=|[\[,]\s*)({_NO_TEXT})(?=\s*(?:[\],]|$))")
RUN = Program("python -m gpt2_fp8.run", RunConfig)


@dataclass
class CommandLine:
    """A command line that was read."""

    overrides: list[Override] = field(default_factory=list)  # its words that can be read
    problems: list[Problem] = field(default_factory=list)  # what is wrong with the others, and with the flags
    flags: list[str] = field(default_factory=list)  # as Hydra takes them, in front of the overrides
    shows: str | None = None  # the flag that only asks to see something, by argparse's name
    multirun: bool = False
    config_name: str = "config"
    config_dir: str | None = None


def read(argv: list[str], program: Program = RUN) -> CommandLine:
    """Read a command line (without the program's name)."""
    parser = hydra_private.flag_parser()  # with exactly the flags that Hydra accepts

    def refuse(message: str) -> NoReturn:
        raise UserError.of(f"the flags cannot be read: {message}", f"{program.command} --help")

    parser.error = refuse  # type: ignore[method-assign]
    try:
        args, left = parser.parse_known_args(argv)
    except UserError as error:
        return CommandLine(problems=error.problems)
    words = [*args.overrides, *(word for word in left if not word.startswith("-"))]
    several: list[Problem] = []
    overrides, problems = parse(_spell(_name_folder(words, program.folder, several), program.schema))
    given = hydra_private.given_flags(parser, args)
    problems = [*(_no_flag(word, program) for word in left if word.startswith("-")), *several, *problems]
    for name, flag in given.items():
        if program.flags is not None and name not in program.flags:
            problems.append(Problem(f"{flag} is a flag of {RUN.command} alone"))
        elif name in _REFUSED:
            problems.append(Problem(f"{flag} {_REFUSED[name]}"))
    if len(one := [flag for name, flag in given.items() if name in _ONE_OF]) > 1:
        problems.append(Problem(f"{' and '.join(one)} cannot be given together"))
    options = {flag.partition("/")[0]: getattr(args, name) for name, flag in given.items()}
    flags = [flag if value is True else f"{flag}={value}" for flag, value in options.items()]
    shows = next((name for name in _SHOW if name in given), None)
    name = (args.config_name or "config").removesuffix(".yaml")
    return CommandLine(overrides, problems, flags, shows, args.multirun, name, args.config_dir)


def parse(words: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """Return the words that are overrides, and what is wrong with the others. Hydra would stop at the first."""
    overrides, problems = [], []
    for word in words:
        try:
            if "=" not in word and not word.startswith("~"):
                raise ValueError("it is not of the form key=value")
            word.encode()  # not possible for bytes that are no UTF-8
            override = parse_override(word)
            if not override.key_or_group:
                raise ValueError("it has no key in front of =")
            overrides.append(override)
        except (HydraException, ValueError, OverflowError, RecursionError) as error:  # a number of 5000 digits, [[[[...
            reason = " ".join(str(error).split()).partition(" expecting {")[0]
            remedy = "quote the value for Hydra and the whole for the shell: 'key=\"value\"'" if "=" in word else ""
            told = f"{shown.shorten(word, 200)} cannot be read: {shown.shorten(reason, 300)}"
            problems.append(Problem(told, remedy, (word.lstrip("+").partition("=")[0],)))
    return overrides, problems


@lru_cache(maxsize=4096)  # a sweep's jobs repeat most of their words
def parse_override(word: str) -> Override:
    """Parse one override. Raises HydraException, or for a huge value ValueError, OverflowError or RecursionError."""
    return OverridesParser.create().parse_override(word)


def strip_force(words: Iterable[str]) -> list[str]:
    """Return words of Hydra's line as they were typed: it forces some values (`++key=value`)."""
    return [word.removeprefix("++") for word in words]


def _spell(words: list[str], schema: type) -> list[str]:
    """Return the words in Hydra's spelling: the choice of nothing may be `group=null`, and text is text as it looks."""
    said = []
    for place, word in enumerate(words):
        group, _, choice = word.lstrip("+").partition("=")
        if group in _HYDRAS_TEXTS or is_text(schema, group):
            word = _as_text(word)
        if group in MAY_BE_NULL and choice == "null":
            later = any(other.lstrip("+").startswith(f"{group}=") for other in words[place + 1 :])
            said += [] if later else [f"~{group}"]
        else:
            said.append(f"{word[1:]}=none" if word.startswith("~") and word[1:] in _WITH_NONE else word)
    return said


def _name_folder(words: list[str], key: str | None, problems: list[Problem]) -> list[str]:
    """Return the words with `key=` in front of a folder that was typed alone; a second one is added to `problems`."""
    if key is None:
        return words
    alone = [word for word in words if "=" not in word and not word.startswith("~")]
    alone += [word for word in words if "/" in word.partition("=")[0] and os.path.isdir(word)]  # a job of a sweep
    words = [shown.format_override(key, word) if word in alone else word for word in words]
    named = [word for word in words if word.startswith(f"{key}=")]
    if not alone or len(named) == 1:
        return words
    told = ", ".join(shown.shorten(word, 200) for word in named)
    problems.append(Problem(f"{told}: it takes one", "one FOLDER; all else is KEY=VALUE"))
    return [word for word in words if word not in named[1:]]


def _as_text(word: str) -> str:
    """Return `key=value` with quotes around each item of which Hydra would make something else than text."""
    return _ITEM.sub(lambda found: f'{found[1]}"{found[2]}"' if found[2] else found[0], word)


def _no_flag(word: str, program: Program) -> Problem:
    """Report a flag such as --lr=0.1, with the key that was meant if there is one."""
    key, _, value = word.lstrip("-").partition("=")
    meant = key_named(key.replace("-", "_"), program.schema)
    typed = meant if meant and "=" in meant else f"{meant or 'KEY'}={value or 'VALUE'}"
    return Problem(f"{word} is no flag of {program.command}", f"{typed}, without dashes")


# ---- the keys of a program of its own --------------------------------------------------------------------------------


def values_of(overrides: list[Override], problems: list[Problem]) -> dict[str, Any]:
    """Return the values that words set. Adds to `problems` what is none."""
    wrong = [word for word in overrides if word.is_delete() or word.is_sweep_override()]
    problems += [Problem(f"{word.input_line}: not a single value", f"{word.key_or_group}=VALUE") for word in wrong]
    return {word.key_or_group: word.value() for word in overrides if word not in wrong}


def list_keys(cls: type[Any]) -> str:
    """Return a program's keys for its `--help`, a line each: name, meaning, default."""
    about, default = meanings(cls), vars(cls())
    width = max(map(len, about))
    return "\n".join(f"  {key:<{width}}  {text} [{show(default[key])}]" for key, text in about.items())
