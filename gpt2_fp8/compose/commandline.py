"""The flags of a command line, as Hydra takes them, and the words that should be overrides (`key=value`)."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.config import foreign_keys, typed
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import is_text, key_paths
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import programs


class Program(NamedTuple):
    """A program, and what its command line may have."""

    command: str  # as it is typed
    schema: type  # has its keys
    flags: tuple[str, ...] | None = None  # the flags of Hydra's that it takes, by argparse's name; None: all


MAY_BE_NULL = ("experiment", "debug")
SEVERAL = ("logger", *MAY_BE_NULL)  # groups of which a run may have several choices, as a list
_MAY_BE_LEFT_OUT = ("callbacks", "logger")  # the groups with a choice `none`
_HYDRAS_TEXTS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
RUN = Program("python -m gpt2_fp8.run", RunConfig)


@dataclass
class CommandLine:
    """The flags that matter before a run, and the words that should be overrides."""

    words: list[str] = field(default_factory=list)
    multirun: bool = False
    config_name: str = "config"
    config_dir: str | None = None


def is_help(argv: list[str]) -> bool:
    """Return whether a command line only asks Hydra to show something. Then there is no run to check."""
    if programs.asks_version(argv):
        return True
    try:
        args = flags(argv)
    except UserError:
        return False
    return _shows(args)


def flags(argv: list[str]) -> argparse.Namespace:
    """Parse the flags of a command line. Raises UserError if that fails."""
    args = _flags().parse_known_args(argv)[0]
    _own_folder(args)
    return args


def read(argv: list[str], program: Program = RUN) -> tuple[CommandLine, list[Problem]]:
    """Return the flags and the words of a command line, and what is wrong with the flags."""
    parser = _flags(program)
    try:
        args, left = parser.parse_known_args(argv)
        _own_folder(args)
    except UserError as error:
        return CommandLine(), error.problems
    problems, words = _other_programs_flags(parser, args, program), _hydras_words(args.overrides, program.schema)
    dashed = [word for word in left if word.startswith("-")]
    for word in dashed:
        key, _, value = word.lstrip("-").partition("=")
        following = argv[argv.index(word) + 1 :][:1]
        if not value and following and "=" not in following[0]:  # --lr 0.1
            value = following[0]
            words = [w for w in words if w != value]
        problems.append(_no_flag(word, key, value, program))
    late = [word for word in left if not word.startswith("-") and "=" in word]
    if late and not dashed:
        cause = f"{late[0]} comes after a flag that stands between the overrides"
        line = shlex.join([*_flag_words(args), *words, *late])
        problems.append(Problem(cause, f"flags first: {program.command} {line}"))
    if args.config_path is not None:
        remedy = "-cd FOLDER adds yours to them; -cn NAME beside it has a NAME.yaml that begins with config"
        problems.append(Problem("--config-path would hide this program's own settings", remedy))
    if args.experimental_rerun is not None:
        problems.append(
            Problem(
                "--experimental-rerun would unpickle a file", "repeat the words of outputs/RUN/.hydra/overrides.yaml"
            )
        )
    if program.flags is None and not _shows(args):
        problems += without_effect(args)
    name = (args.config_name or "config").removesuffix(".yaml")
    return CommandLine(words + late, args.multirun, name, args.config_dir), problems


def without_effect(args: argparse.Namespace) -> list[Problem]:
    """Report flags that say how `--cfg` shows a configuration, where nothing is shown so."""
    problems = []
    if args.resolve and not (args.cfg or args.help):
        problems.append(Problem("--resolve says how --cfg shows a configuration", "--cfg job --resolve"))
    if args.package and not args.cfg:
        cause = "--package says which part of a configuration --cfg shows"
        problems.append(Problem(cause, shlex.join(["--cfg", "job", "--package", args.package])))
    return problems


def flags_first(argv: list[str]) -> list[str]:
    """Return a checked command line of a run with its flags first.

    Lightning appends overrides to it for the processes of other ranks.
    """
    args = flags(argv)
    return [*_flag_words(args), *_hydras_words(args.overrides)]


def of_job(argv: list[str], words: list[str], folder: str) -> list[str]:
    """Return the command line of a sweep's job alone: the sweep's flags, the job's words, and its folder."""
    shared = [word for word in _flag_words(flags(argv)) if word != "-m"]
    return [*shared, *words, f"hydra.run.dir={quoted(folder)}"]


def quoted(text: str) -> str:
    """Return a text as the value of an override: in quotes, with everything escaped that Hydra would read."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


def shown_by_hydra(args: argparse.Namespace) -> list[str]:
    """Return the command line, of these flags, that only asks Hydra to show something."""
    if args.hydra_help and not args.help:
        return ["--hydra-help"]
    words = ["--help"] if args.help else []
    words += ["--cfg", args.cfg] if args.cfg else []
    words += [f"--info={args.info}"] if args.info else []
    words += ["--resolve"] if args.resolve else []
    words += ["--package", args.package] if args.package else []
    return [*words, *_flag_words(args), *_hydras_words(args.overrides)]


def _shows(args: argparse.Namespace) -> bool:
    """Return whether Hydra is only to show something."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def _hydras_words(words: list[str], schema: type = RunConfig) -> list[str]:
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
            said.append(f"{word[1:]}=none" if word.startswith("~") and word[1:] in _MAY_BE_LEFT_OUT else word)
    return said


def _own_folder(args: argparse.Namespace) -> None:
    """Read `-cp FOLDER -cn NAME` as `-cd FOLDER -cn NAME`: a NAME.yaml that builds on `config` needs both folders."""
    if args.config_path and args.config_name and not args.config_dir:
        args.config_dir, args.config_path = args.config_path, None


def _flag_words(args: argparse.Namespace) -> list[str]:
    """Return the flags that a run may have, as they are typed."""
    words = ["-m"] if args.multirun else []
    words += ["-cn", args.config_name] if args.config_name else []
    return words + (["-cd", args.config_dir] if args.config_dir else [])


def _flags(program: Program = RUN) -> argparse.ArgumentParser:
    parser = hydra_private.flag_parser()  # with exactly the flags that Hydra accepts
    remedy = f"{program.command} {'--hydra-help lists them' if program.flags is None else '--help shows what there is'}"

    def refuse(message: str) -> NoReturn:
        raise UserError.of(f"the flags cannot be read: {message}", remedy)

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def _other_programs_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, program: Program) -> list[Problem]:
    """Report flags of Hydra's that this program has no use for."""
    given = hydra_private.given_flags(parser, args)
    refused = [typed for name, typed in given.items() if program.flags is not None and name not in program.flags]
    remedy = f"leave it out; {program.command} --help shows what there is"
    return [Problem(f"{typed} is a flag of {RUN.command} alone", remedy) for typed in refused]


def _no_flag(word: str, key: str, value: str, program: Program) -> Problem:
    """Report a flag such as --lr=0.1 or --max_steps 10, and name the key that was meant if there is one."""
    key = key.replace("-", "_")
    if key == "local_rank":  # the same for every process, without its number
        cause = (
            "--local-rank, which torch.distributed.launch and deepspeed add to the words, is not a flag of this program"
        )
        return Problem(cause, "torchrun in their place, with the same options: it sets LOCAL_RANK instead")
    known = key_paths(program.schema)
    leaves = {path.rpartition(".")[2]: path for path in reversed(known)}
    told = foreign_keys.advice(key, value or None)
    groups = {path.partition(".")[0] for path in known if "." in path} | {"experiment", "debug"}
    path = key if key in known or key in groups else leaves.get(key)
    if path:
        remedy = f"keys have no dashes: {path}={value or 'VALUE'}"
    elif told:
        remedy = f"keys have no dashes; here it is {told[1]}"
    else:
        remedy = f"keys have no dashes: key=value; {program.command} --help shows how"
    return Problem(f"{word} is not a flag of this program", remedy)
