"""The flags of a command line, as Hydra parses them, and its overrides (`key=value`, `group=choice`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.config import hints, typed
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import is_text
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import shortened
from gpt2_fp8.runtime import programs


class Program(NamedTuple):
    """A program, and what its command line may have."""

    command: str  # as it is typed
    schema: type  # has its keys
    flags: tuple[str, ...] | None = None  # the flags of Hydra's that it takes, by argparse's name; None: all


MAY_BE_NULL = ("experiment", "debug")
SEVERAL = ("logger", *MAY_BE_NULL)  # groups of which a run may have several choices, as a list
_WITH_NONE = ("callbacks", "logger")  # the groups with a choice `none`
_HYDRAS_TEXTS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_SHOW = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")  # Hydra takes only one of them
RUN = Program("python -m gpt2_fp8.run", RunConfig)


@dataclass
class CommandLine:
    """The flags that matter before a run, and the words that should be overrides."""

    words: list[str] = field(default_factory=list)
    multirun: bool = False
    config_name: str = "config"
    config_dir: str | None = None


def is_help(argv: list[str]) -> bool:
    """Return whether a command line only asks Hydra to show something."""
    if programs.asks_version(argv):
        return True
    try:
        return _shows(_flags(argv)[0])
    except UserError:
        return False


def read(argv: list[str], program: Program = RUN) -> tuple[CommandLine, list[Problem]]:
    """Return the flags and the words of a command line, and what is wrong with the flags."""
    try:
        args, left = _flags(argv, program)
    except UserError as error:
        return CommandLine(), error.problems
    words = _spelled([*args.overrides, *(word for word in left if not word.startswith("-"))], program.schema)
    problems = [_no_flag(word, program) for word in left if word.startswith("-")]
    given = hydra_private.given_flags(hydra_private.flag_parser(), args)
    problems += [
        Problem(f"{flag} is a flag of {RUN.command} alone")
        for name, flag in given.items()
        if program.flags is not None and name not in program.flags
    ]
    if args.config_path is not None:
        problems.append(Problem("--config-path would hide this program's own settings", "-cd FOLDER adds yours"))
    if args.experimental_rerun is not None:
        problems.append(Problem("--experimental-rerun would unpickle a file"))
    name = (args.config_name or "config").removesuffix(".yaml")
    return CommandLine(words, args.multirun, name, args.config_dir), problems


def for_hydra(argv: list[str], words: list[str]) -> list[str]:
    """Return a command line with its flags first, as Hydra takes them, and then `words` as its overrides."""
    args, _ = _flags(argv)
    given = hydra_private.given_flags(hydra_private.flag_parser(), args)
    flags: list[str] = []
    for name, flag in given.items():
        value = getattr(args, name)
        option = flag.partition("/")[0]
        flags += [] if name == "overrides" else [option] if value is True else [f"{option}={value}"]
    return [*flags, *words]


def unforced(words: Iterable[str]) -> list[str]:
    """Return words of Hydra's line as they were typed: it forces some values (`++key=value`)."""
    return [word.removeprefix("++") for word in words]


def shown(argv: list[str]) -> tuple[str | None, list[Problem]]:
    """Return what a command line asks Hydra to show (`job`, of `--cfg job`), and flags that contradict each other."""
    args, _ = _flags(argv)
    given = [flag for flag in _SHOW if getattr(args, flag.lstrip("-").replace("-", "_"))]
    return args.cfg, [Problem(f"{' and '.join(given)} cannot be given together")] if len(given) > 1 else []


def quoted(text: str) -> str:
    """Return a text as the value of an override: in quotes, with everything escaped that Hydra would read."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


@lru_cache(maxsize=4096)  # a sweep's jobs repeat most of their words
def parsed(word: str) -> Override:
    """Parse one override.

    Raises HydraException, or for a huge value ValueError, OverflowError or RecursionError.
    """
    return OverridesParser.create().parse_override(word)


def overrides_of(words: list[str]) -> tuple[list[Override], list[Problem]]:
    """Return the words that are overrides, and what is wrong with the others. Hydra would stop at the first."""
    overrides, problems = [], []
    for word in words:
        try:
            if "=" not in word and not word.startswith("~"):
                raise ValueError("it is not of the form key=value")
            word.encode()  # not possible for bytes that are no UTF-8
            override = parsed(word)
            if not override.key_or_group:
                raise ValueError("it has no key in front of =")
            overrides.append(override)
        except (HydraException, ValueError, OverflowError, RecursionError) as error:  # a number of 5000 digits, [[[[...
            reason = " ".join(str(error).split()).partition(" expecting {")[0]
            remedy = "quote the value for Hydra and the whole for the shell: 'key=\"value\"'" if "=" in word else ""
            problems.append(Problem(f"{shortened(word, 200)} cannot be read: {shortened(reason, 300)}", remedy))
    return overrides, problems


def _flags(argv: list[str], program: Program = RUN) -> tuple[argparse.Namespace, list[str]]:
    """Parse the flags of a command line; returns what is left too. Raises UserError if that fails."""
    parser = hydra_private.flag_parser()  # with exactly the flags that Hydra accepts

    def refuse(message: str) -> NoReturn:
        raise UserError.of(f"the flags cannot be read: {message}", f"{program.command} --help")

    parser.error = refuse  # type: ignore[method-assign]
    args, left = parser.parse_known_args(argv)
    if args.config_path and args.config_name and not args.config_dir:  # a NAME.yaml that builds on `config`
        args.config_dir, args.config_path = args.config_path, None
    return args, left


def _shows(args: argparse.Namespace) -> bool:
    """Return whether Hydra is only to show something."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def _spelled(words: list[str], schema: type) -> list[str]:
    """Return the words in Hydra's spelling.

    `group=null` and `~group` may mean the choice of nothing. The value of a text key is text, however it looks.
    """
    said = []
    for place, word in enumerate(words):
        group, _, choice = word.lstrip("+").partition("=")
        if group in _HYDRAS_TEXTS or is_text(schema, re.sub(r"^data\.sources\.\w+\.", "data.", group)):
            word = typed.as_text(word)
        if group in MAY_BE_NULL and choice == "null":
            later = any(other.lstrip("+").startswith(f"{group}=") for other in words[place + 1 :])
            said += [] if later else [f"~{group}"]
        else:
            said.append(f"{word[1:]}=none" if word.startswith("~") and word[1:] in _WITH_NONE else word)
    return said


def _no_flag(word: str, program: Program) -> Problem:
    """Report a flag such as --lr=0.1, with the key that was meant if there is one."""
    key, _, value = word.lstrip("-").replace("-", "_").partition("=")
    meant = hints.key_named(key, program.schema)
    return Problem(f"{word} is no flag of {program.command}", f"{meant or 'KEY'}={value or 'VALUE'}, without dashes")
