"""The benchmark's command line: its own settings, and each of its cases as the command line of a run.

A case is composed and checked by what checks runs, so that a key means the same in both programs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override

from gpt2_fp8.compose import conf_dir, configs_of
from gpt2_fp8.compose.catalog import BENCH, Catalog, open_catalog
from gpt2_fp8.compose.commandline import CommandLine, Program, parse, read
from gpt2_fp8.config import bench_schema, hints, parsing
from gpt2_fp8.config.bench_schema import BenchConfig, BenchRunConfig
from gpt2_fp8.config.checks import VOCABULARY
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.schema import RunConfig

PROGRAM = Program("python -m gpt2_fp8.bench", BenchRunConfig, flags=("help", "overrides", "config_dir"))
_LISTS = ("model", "precision", "recipe", "micro_batch_size")
_OF_A_RUN = re.compile(rf"(?<![\w.])({'|'.join(_LISTS)})=(\w+)")
_INSTEAD = {"fp8_e5m2": "fp8_hybrid"}  # a choice that every run refuses
_OWN = tuple(field.name for field in fields(BenchConfig))
_HERE = {"trainer.max_steps": "steps", "trainer.profiler": "profile", "global_batch_size": "global_batch_size"}
# Of a run's keys, those that change nothing of what is measured.
_MEANINGLESS = (
    "run_name",
    "tags",
    "notes",
    "ckpt_path",
    "init_from",
    "callbacks",
    "logger",
    "debug",
    "data.val_sequences",
)
_OF_TRAINER = ("trainer.accelerator", "trainer.deterministic")  # those of its keys that do


class _Case(NamedTuple):
    model: str
    micro_batch_size: int
    precision: str
    recipe: str | None  # None: not FP8
    extra: tuple[str, ...] = ()  # words that come last

    def has(self, key: str) -> bool:
        """Whether a key changes anything in this case: some belong to one precision or recipe."""
        tags, group = parsing.key_paths(RunConfig).get(key, ()), key.partition(".")[0]
        if group == "recipe" and self.recipe is None:
            return False
        if key == "cuda_graphs" and self.recipe != "delayed":  # the fused layers' alone
            return False
        return not tags or group not in ("precision", "recipe") or getattr(self, group) in tags

    def words(self, given: Sequence[Override]) -> list[str]:
        """The command line of a run that would train this."""
        first = [f"model={self.model}", f"precision={self.precision}", *([f"recipe={self.recipe}"] * bool(self.recipe))]
        sizes = [f"{key}={self.micro_batch_size}" for key in ("micro_batch_size", "global_batch_size")]
        return [*first, *(str(o.input_line) for o in given if self.has(o.key_or_group)), *sizes, *self.extra]


def defaults(gpu: bool) -> dict[str, Any]:
    """The settings of `conf/bench.yaml`."""
    return dict(yaml.safe_load((conf_dir() / f"{BENCH}.yaml").read_text())["gpu" if gpu else "cpu"])


def preflight(argv: list[str], gpu: bool) -> tuple[BenchConfig, list[RunConfig]]:
    """What a command line (without the program's name) asks to be measured, on a GPU or on a CPU: the settings, and the
    configuration of each case. On a GPU, bf16 under torch.compile is among them for each model and micro-batch, unless
    `bench.baseline=false`.

    Raises UserError with every problem, each once.
    """
    line, problems = read(argv, PROGRAM)
    with open_catalog(conf_dir(), "config") as catalog:
        problems += catalog.add_folders([line.config_dir] if line.config_dir else [])
        words, found = parse([word for word in line.words if word != BENCH], catalog, PROGRAM)
        problems += [_one_by_one(word) for word in line.words if word == BENCH] + found
        own = [o for o in words if o.key_or_group.partition(".")[0] == BENCH]
        refused = {id(o): problem for o in words if o not in own and (problem := _refusal(o, catalog))}
        problems += refused.values()
        given = [o for o in words if o not in own and id(o) not in refused]
        gpu = gpu and not any(o.input_line in ("trainer=cpu", "trainer.accelerator=cpu") for o in given)
        bench = _settings(own, catalog, gpu, problems)
        configs = _configs(bench, given, catalog, gpu, problems)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return bench, configs


def in_lists(text: str) -> str:
    """What is said of a run's keys, for someone who types lists: precision=bf16 as 'bench.precision=[bf16]'."""
    return _OF_A_RUN.sub(r"'bench.\1=[\2]'", text)


def _refusal(override: Override, catalog: Catalog) -> Problem | None:
    """Why a word that would be right in a run is not in a benchmark."""
    key, line = override.key_or_group, str(override.input_line)
    value = line.partition("=")[2]
    if override.is_hydra_override():
        return Problem(f"{line}: the benchmark keeps a folder and a log of its own", f"leave {key} out")
    if key in _LISTS:
        return Problem(f"{line}: the benchmark goes through a list", _as_list(key, value, catalog))
    if key in _HERE:
        return Problem(f"{line}: the benchmark has a key of its own", f"bench.{_HERE[key]}=VALUE")
    if key in _OWN:
        return Problem(f"there is no key {key}", f"did you mean bench.{key}={value}?")
    of_trainer = key.startswith("trainer.") and key in parsing.key_paths(RunConfig) and key not in _OF_TRAINER
    if of_trainer or key in _MEANINGLESS or key.partition(".")[0] in _MEANINGLESS:
        return Problem(f"{line}: this changes nothing of what is measured", f"leave {key} out")
    if override.is_sweep_override():
        lists = hints.either([f"bench.{name}" for name in _LISTS])
        return Problem(f"{line} is several values", f"give one; what the benchmark goes through is {lists}")
    return None


def _as_list(key: str, value: str, catalog: Catalog) -> str:
    """What to type instead of a run's `key=value`: the list of what it names, an example where it names nothing."""
    named = [item.strip() for item in value.strip("[]").split(",")]
    if key == "micro_batch_size":
        right = [item for item in named if item.isdecimal() and int(item)]
    else:
        options = _options(catalog, key)
        right = [match for item in named for match in hints.near(_INSTEAD.get(item, item), options, 1)]
    return f"'bench.{key}=[{','.join(right)}]'" if len(right) == len(named) else hints.VALUES[f"bench.{key}"]


def _options(catalog: Catalog, group: str) -> list[str]:
    """The choices of a group that can be measured. `auto` is none: it measures by itself."""
    return [name for name in catalog.get_group_options(group) if name != "auto"]


def _one_by_one(word: str) -> Problem:
    return Problem(f"{word}: its keys are set one by one", f"bench.KEY=VALUE; {PROGRAM.command} --help lists them")


def _settings(own: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]) -> BenchConfig:
    """The `bench` keys. What is wrong with them is added to `problems`, and is as if it had not been said."""
    data = defaults(gpu)
    values = {**data, **_values(own, problems)}
    _, found = parsing.build(BenchConfig, values, BENCH)
    bench = _leave_out(found, values, data, problems)
    bench = _leave_out(list(bench_schema.check(bench)), values, data, problems)
    return _leave_out(_choices(bench, catalog), values, data, problems)


def _leave_out(
    findings: list[Finding], values: dict[str, Any], data: dict[str, Any], problems: list[Problem]
) -> BenchConfig:
    """Say what was found, and take the keys that it speaks of from the file's own values, `data`."""
    problems += [finding.problem for finding in findings]
    for key in {key.partition(".")[2] for finding in findings for key in finding.keys}:
        values.pop(key, None)
        values |= {key: data[key]} if key in data else {}
    bench, _ = parsing.build(BenchConfig, values, BENCH)
    assert bench is not None, "the file's own values are right"
    return bench


def _values(own: list[Override], problems: list[Problem]) -> dict[str, Any]:
    """What the words say; a single value stands for a list of one."""
    values: dict[str, Any] = {}
    for override in own:
        line, key = str(override.input_line), override.key_or_group.removeprefix("bench.")
        if override.is_delete() or key == BENCH:
            problems.append(_one_by_one(line))
        elif override.is_sweep_override():
            value = line.partition("=")[2]
            problems.append(Problem(f"{line}: a list stands in brackets", f"'{override.key_or_group}=[{value}]'"))
        else:
            one = override.value()
            values[key] = one if key not in _LISTS or one is None or isinstance(one, (list, dict)) else [one]
    return values


def _choices(bench: BenchConfig, catalog: Catalog) -> list[Finding]:
    """Names in the lists that are no choice."""
    found = []
    for group in ("model", "precision", "recipe"):
        options = _options(catalog, group)
        for name in getattr(bench, group):
            if name not in options and not (catalog.refused_folder and group == "model"):
                problem = Problem(*hints.unknown_choice(f"bench.{group}", name, options))
                found.append(Finding((f"bench.{group}",), problem))
    return found


def _configs(
    bench: BenchConfig, given: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]
) -> list[RunConfig]:
    """The configuration of each case, in turn. What is wrong with any is added to `problems`."""
    configs: list[RunConfig] = []
    used: set[str] = set()
    for model, size in itertools.product(dict.fromkeys(bench.model), dict.fromkeys(bench.micro_batch_size)):
        cases = [
            _Case(model, size, precision, recipe)
            for precision in dict.fromkeys(bench.precision)
            for recipe in (dict.fromkeys(bench.recipe) if precision.startswith("fp8") else [None])
        ]
        used |= {o.key_or_group for o in given for case in cases if case.has(o.key_or_group)}
        group = [config for case in cases for config in _config(bench, case, given, catalog, gpu, problems)]
        if gpu and bench.baseline and not any(config.precision.name == "bf16" and config.compile for config in group):
            baseline = _Case(model, size, "bf16", None, ("compile=true",))
            group = [*_config(bench, baseline, given, catalog, gpu, problems), *group]
        configs += group
    for override in given:
        if override.key_or_group not in used:
            remedy = "leave it out, or add to bench.precision or bench.recipe what has it"
            problems.append(Problem(f"{override.input_line}: no case of this benchmark has this key", remedy))
    return configs


def _config(
    bench: BenchConfig, case: _Case, given: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]
) -> list[RunConfig]:
    """A case's configuration, with the sizes that the benchmark gives it; none where something is wrong with it."""
    found: list[Problem] = []
    configs = configs_of(CommandLine(case.words(given)), catalog, found)
    problems += [Problem(*map(in_lists, problem)) for problem in found]
    if any(config.trainer.devices != 1 or config.trainer.num_nodes != 1 for config in configs):
        problems.append(Problem("the benchmark measures one device, and this is a run on several", "trainer=gpu"))
    done = []
    for config in configs:
        model = config.model
        if model.vocab_size is None and model.name.startswith(("gpt2", "llama")):
            model = replace(model, vocab_size=VOCABULARY["gpt2"])  # whatever the text
        whole = bench_schema.sequences_per_step(bench, case.micro_batch_size, model.n_positions, gpu)
        done.append(replace(config, model=model, global_batch_size=whole))
    return done
