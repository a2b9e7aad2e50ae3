"""The command line of `evaluate`: words on top of the configuration that a checkpoint holds.

A choice (`data=fineweb`) replaces a group by what a run would have; `group.key=value` changes a key of what is there.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, fields
from typing import Any, NamedTuple, cast

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.compose import conf_dir, own_keys
from gpt2_fp8.compose.commandline import Program, overrides_of, read
from gpt2_fp8.compose.composition import Catalog, open_catalog
from gpt2_fp8.config import evaluate_schema, hints, parsing
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.evaluate_schema import EvaluateConfig, EvaluateRunConfig
from gpt2_fp8.config.keys import key_paths, show
from gpt2_fp8.config.schema import RunConfig

PROGRAM = Program("python -m gpt2_fp8.evaluate", EvaluateRunConfig, flags=("help", "overrides", "config_dir"))
_OWN = [field.name for field in fields(EvaluateConfig)]


class Request(NamedTuple):
    """A command line: the program's own settings, the words that are about a run's keys, and what is wrong so far."""

    own: EvaluateConfig
    words: list[Override]
    config_dir: str | None
    problems: list[Problem]


def read_words(argv: list[str]) -> Request:
    """Read a command line (without the program's name).

    Raises UserError with every problem, if one of them is that the model is not there. Other problems wait in the
    result for those that only the model's configuration shows.
    """
    line, problems = read(argv, PROGRAM)
    words, found = overrides_of(line.words)
    problems += found
    mine = [word for word in words if word.key_or_group in _OWN]
    given = own_keys.values(mine, problems)
    own = own_keys.settings(EvaluateConfig, given, problems)
    problems += (found := evaluate_schema.check(own))
    if any("ckpt_path" in problem.cause for problem in found):
        raise UserError(dict.fromkeys(problems))
    return Request(own, [word for word in words if word not in mine], line.config_dir, problems)


def configuration(request: Request, trained: RunConfig) -> RunConfig:
    """Return the configuration of an evaluation. `trained`: what the checkpoint holds.

    Raises UserError with every problem of the command line.
    """
    problems, plain = list(request.problems), copy.deepcopy(asdict(trained))
    with open_catalog(conf_dir(), "config") as catalog:
        problems += catalog.add_folders([request.config_dir] if request.config_dir else [])
        values = _chosen(request.words, catalog, plain, problems)
        typed = set(values) | {word.key_or_group for word in request.words if catalog.is_group(word)}
    known = key_paths(RunConfig)
    for word in list(values):
        is_known = word in known or any(path.startswith(f"{word}.") for path in known)
        if is_known and (problem := evaluate_schema.refusal(word, f"{word}={show(values[word])}")):
            problems.append(problem)
        elif not (is_known or "." in word) or not _put(plain, word, values[word]):
            problems.append(_unknown(word))
    config = _built(plain, problems)
    if config is not None:
        config = evaluate_schema.for_evaluation(config, typed)
        found = evaluate_schema.check_run(config, trained)
        problems += [evaluate_schema.in_own_words(evaluate_schema.of_checkpoint(one, typed)) for one in found]
    if problems:
        raise UserError(dict.fromkeys(problems))
    assert config is not None
    return config


def _chosen(words: list[Override], catalog: Catalog, plain: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Put the groups that words choose into `plain`; returns the values that the other words set."""
    choices = [word for word in words if catalog.is_group(word)]
    taken = []
    for word in choices:
        group, line = word.key_or_group, str(word.input_line)
        if word.is_delete() or word.is_sweep_override():
            problems.append(Problem(f"{line}: one choice of a group is evaluated", f"{group}=CHOICE"))
        elif group not in evaluate_schema.GROUPS:
            problem = evaluate_schema.refusal(group, line)
            problems.append(problem or Problem(f"there is no group {group}", "data, precision, recipe or trainer"))
        elif str(word.value()) not in (options := catalog.get_group_options(group)):
            problems.append(Problem(*hints.unknown_choice(group, str(word.value()), options)))
        elif line == "trainer=ddp":
            problems.append(Problem(f"{line}: an evaluation is of one device", "trainer=gpu, or trainer=cpu"))
        else:
            taken.append(word)
    if taken:
        cfg = catalog.compose([str(word.input_line) for word in taken])
        composed = cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=False))
        for group in {word.key_or_group for word in taken} & composed.keys():
            _replace(plain, group, _resolved(group, composed[group], plain["seed"], problems))
    return own_keys.values([word for word in words if word not in choices], problems)


def _resolved(group: str, composed: dict[str, Any], seed: int, problems: list[Problem]) -> dict[str, Any]:
    """Return a group with the values that its `${...}` stand for. The seed is the checkpoint's.

    What the checkpoint itself holds, which may be a stranger's, is never resolved.
    """
    try:
        cfg = OmegaConf.create({"seed": seed, group: composed})
        found = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        problems.append(Problem(f"{error.full_key}: {reason}", "write the value in place of ${...}"))
        return composed
    return cast("dict[str, dict[str, Any]]", found)[group]


def _replace(plain: dict[str, Any], group: str, composed: dict[str, Any]) -> None:
    """Replace a group. Of the trainer only the device is taken; text keeps the tokenizer that the model knows."""
    if group == "trainer":
        plain["trainer"]["accelerator"] = composed["accelerator"]
        return
    before, plain[group] = plain[group], composed
    if group == "data":
        source = next(iter(before["sources"].values())) if "sources" in before else before
        for one in composed["sources"].values() if "sources" in composed else [composed]:
            one["tokenizer"] = source["tokenizer"]


def _unknown(key: str) -> Problem:
    there = [*_OWN, *evaluate_schema.GROUPS, *evaluate_schema.KEYS]
    near = hints.either(hints.near(key, there))
    return Problem(f"there is no key {key}", f"did you mean {near}?" if near else f"there are {', '.join(there)}")


def _put(plain: dict[str, Any], key: str, value: Any) -> bool:
    """Set a value; returns False if there is no place for it."""
    *above, last = key.split(".")
    node: Any = plain
    for part in above:
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return False
    node[last] = value
    return True


def _built(plain: dict[str, Any], problems: list[Problem]) -> RunConfig | None:
    """Build the configuration, or add to `problems`."""
    config, found = parsing.build(RunConfig, plain)
    problems += [finding.problem for finding in found]
    return config
