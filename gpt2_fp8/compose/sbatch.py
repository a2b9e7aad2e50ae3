"""The command line of `sbatch`: the words of a run, checked as the run would check them, and the keys of `slurm`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override

from gpt2_fp8 import compose
from gpt2_fp8.compose import overrides as words_of_run
from gpt2_fp8.compose import slurm_sweep
from gpt2_fp8.compose.commandline import Program, read
from gpt2_fp8.compose.override_parser import parse
from gpt2_fp8.config import checks, own_words, parsing, sbatch_schema, sbatch_words
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.sbatch_schema import PREFIX, SbatchRunConfig, SlurmConfig
from gpt2_fp8.config.schema import RunConfig

PROGRAM = Program("python -m gpt2_fp8.sbatch", SbatchRunConfig, ("help", "overrides", "config_dir", "config_name"))
_SWEEP = "-m hydra/launcher=slurm sends the jobs of a sweep, without a script: docs/slurm.md"
_TEXTS = ("partition", "account", "qos", "constraint", "time", "mem", "gpu_type")  # whose value may look like a number
_LISTS, _NAMES = ("setup", "options"), ("partition", "constraint")  # that may have several values, as a list or a text


class Request(NamedTuple):
    """What a command line asks for: SLURM's part, the run's configuration, and the run's words with its flags first."""

    slurm: SlurmConfig
    config: RunConfig
    words: list[str]

    def has(self, key: str) -> bool:
        """Return whether a word of the run sets a key."""
        return key in own_words.keys(self.words)


def preflight(argv: list[str]) -> Request:
    """Return what a command line (without the program's name) asks for. Raises UserError with every problem."""
    strange = list(sbatch_words.taken_out(argv))
    argv = sbatch_words.without(argv, strange)
    own = [word for word in argv if word.lstrip("+~").startswith((f"{PREFIX}.", f"{PREFIX}="))]
    bare = [word for word in argv if word.lstrip("+").partition("=")[0] in SlurmConfig.__dataclass_fields__]
    words = [word for word in argv if word not in (*own, *bare)]
    said = [word.lstrip("+") for word in bare]
    problems = [problem for _, problem in strange]
    problems += [Problem(f"there is no key {word.partition('=')[0]}", f"{PREFIX}.{word}") for word in said]
    several = "-m" if read(words)[0].multirun else next((word for word in words if "hydra.mode=" in word), None)
    if several is not None:
        problems.append(Problem(f"{several}: a script is for one run", _SWEEP))
    if not str(Path.cwd()).isprintable():
        problems.append(Problem(f"the folder {show(str(Path.cwd()))} has control characters", "cd into another one"))
    problems += read([word for word in words if word not in ("-m", "--multirun")], PROGRAM)[1]
    overrides, found = parse(own, None, PROGRAM)
    problems += found
    slurm = _settings(_values(overrides, problems), problems)
    config = None
    try:
        configs = compose.preflight(words, compose.Purpose(elsewhere=True))
        if len(configs) > 1 and several is None:  # a file of the user's says so
            problems.append(Problem("this is a sweep, and a script is for one run", _SWEEP))
        config = configs[0]
        problems += [found.problem for found in sbatch_schema.check_run(slurm, config)]
        if config.trainer.devices != "auto":
            checks.check_batch(config, sbatch_schema.tasks(config) * config.trainer.num_nodes)
    except UserError as error:
        told = {problem.cause for problem in problems}
        problems += [_for_script(problem) for problem in error.problems if problem.cause not in told]
    if problems:
        raise UserError(dict.fromkeys(problems))
    assert config is not None
    return Request(slurm, config, compose.flags_first(words))


def _for_script(problem: Problem) -> Problem:
    """Return a problem of the run's words, with a remedy that a script for one run can follow."""
    if problem.cause == slurm_sweep.SINGLE:
        return Problem(f"{problem.cause.partition(':')[0]}: a script is for one run", f"leave it out; {_SWEEP}")
    if not problem.cause.endswith(words_of_run.SINGLE):
        return problem
    as_text = problem.remedy.partition("; ")[2]
    return Problem(problem.cause, "; ".join(filter(None, ["choose one", as_text, _SWEEP])))


def _values(overrides: list[Override], problems: list[Problem]) -> dict[str, Any]:
    """Return the values that the words set. Adds to `problems` what is none."""
    values: dict[str, Any] = {}
    for override in overrides:
        line, name = str(override.input_line), override.key_or_group.partition(".")[2]
        if override.is_delete() or not name:
            problems.append(Problem(f"{line}: its keys are set one by one", f"{PREFIX}.KEY=VALUE; --help lists them"))
        elif override.is_sweep_override():
            several = line.partition("=")[2]
            forms = {**dict.fromkeys(_LISTS, f"[{several}]"), **dict.fromkeys(_NAMES, f'"{several}"')}
            remedy = f"all of them: '{PREFIX}.{name}={forms[name]}'" if name in forms else f"one {PREFIX}.{name}"
            problems.append(Problem(f"{line} is several values", remedy))
        else:
            value = override.value()
            is_number = name in _TEXTS and isinstance(value, (int, float)) and not isinstance(value, bool)
            values[name] = line.partition("=")[2] if is_number else value
    return values


def _settings(values: dict[str, Any], problems: list[Problem]) -> SlurmConfig:
    """Build the keys of `slurm`. Problems are added to `problems`, and a wrong key has its default."""
    default = {field.name: getattr(SlurmConfig(), field.name) for field in fields(SlurmConfig)}
    slurm, found = parsing.build(SlurmConfig, default | values, PREFIX)
    slurm = slurm or _without(found, default, values, problems)
    if wrong := list(sbatch_schema.check(slurm)):
        slurm = _without(wrong, default, values, problems)
    return slurm


def _without(
    findings: list[Finding], default: dict[str, Any], values: dict[str, Any], problems: list[Problem]
) -> SlurmConfig:
    problems += [finding.problem for finding in findings]
    wrong = {key.partition(".")[2] for finding in findings for key in finding.keys}
    left = {key: value for key, value in values.items() if key in default and key not in wrong}
    slurm, _ = parsing.build(SlurmConfig, default | left, PREFIX)
    assert slurm is not None, "the defaults are right"
    return slurm
