"""The benchmark's command line: its own settings, and which of a run's keys it takes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override

from gpt2_fp8.compose import benchmark_cases, conf_dir
from gpt2_fp8.compose.benchmark_cases import LISTS
from gpt2_fp8.compose.commandline import Program, overrides_of, read
from gpt2_fp8.compose.composition import BENCH, Catalog, open_catalog
from gpt2_fp8.config import bench_schema, hints, parsing
from gpt2_fp8.config.bench_schema import BenchConfig, BenchRunConfig
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.schema import RunConfig

PROGRAM = Program("python -m gpt2_fp8.bench", BenchRunConfig, flags=("help", "overrides", "config_dir"))
_OWN = tuple(field.name for field in fields(BenchConfig))
_NOT_WITH_ROWS = ("precision", "recipe", "baseline")


def defaults(gpu: bool) -> dict[str, Any]:
    """Return the settings of `conf/bench.yaml`, for a GPU or for a CPU."""
    return dict(yaml.safe_load((conf_dir() / f"{BENCH}.yaml").read_text())["gpu" if gpu else "cpu"])


def preflight(argv: list[str], gpu: bool) -> tuple[BenchConfig, list[RunConfig]]:
    """Return the settings and the configuration of each case that a command line asks for.

    `argv` is without the program's name. On a GPU, each model and micro-batch has a case in bf16 under torch.compile,
    unless `bench.baseline=false`. Raises UserError with every problem, each once.
    """
    line, problems = read(argv, PROGRAM)
    with open_catalog(conf_dir(), "config") as catalog:
        problems += catalog.add_folders([line.config_dir] if line.config_dir else [])
        words, found = overrides_of(line.words)
        problems += found
        own = [o for o in words if o.key_or_group.partition(".")[0] == BENCH]
        refused = {o.input_line: problem for o in words if o not in own and (problem := _refusal(o))}
        problems += refused.values()
        given = [o for o in words if o not in own and o.input_line not in refused]
        gpu = gpu and not any(o.input_line in ("trainer=cpu", "trainer.accelerator=cpu") for o in given)
        bench = _settings(own, catalog, gpu, problems)
        if bench.rows is not None:
            problems += [problem for o in own if (problem := _not_with_rows(o))]
        configs = benchmark_cases.configs(bench, given, catalog, gpu, problems)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return bench, configs


def _refusal(override: Override) -> Problem | None:
    """Return why a word that would be right for a run is wrong for a benchmark, or None."""
    key, line = override.key_or_group, str(override.input_line)
    value = line.partition("=")[2]
    if override.is_hydra_override():
        return Problem(f"{line}: the benchmark keeps a folder and a log of its own", f"leave {key} out")
    if key in LISTS:
        return Problem(f"{line}: the benchmark goes through a list", f"'bench.{key}=[{value.strip('[]')}]'")
    if key in benchmark_cases.HERE:
        return benchmark_cases.refusal(override)
    if key in _OWN:
        return Problem(f"there is no key {key}", f"did you mean bench.{key}={value}?")
    if problem := benchmark_cases.refusal(override):
        return problem
    if override.is_sweep_override():
        lists = hints.either([f"bench.{name}" for name in LISTS])
        return Problem(f"{line} is several values", f"give one; what the benchmark goes through is {lists}")
    return None


def _not_with_rows(override: Override) -> Problem | None:
    name, line = override.key_or_group.removeprefix("bench."), str(override.input_line)
    if name not in _NOT_WITH_ROWS:
        return None
    remedy = "write it into the rows" if name in LISTS else f"leave {override.key_or_group} out"
    return Problem(f"{line}, and bench.rows has rows with words of their own", remedy)


def _options(catalog: Catalog, group: str) -> list[str]:
    """List the choices of a group that can be measured. `auto` is none: it is the backend's own."""
    return [name for name in catalog.get_group_options(group) if name != "auto"]


def _one_by_one(word: str) -> Problem:
    return Problem(f"{word}: its keys are set one by one", f"bench.KEY=VALUE; {PROGRAM.command} --help lists them")


def _settings(own: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]) -> BenchConfig:
    """Build the `bench` keys. Problems are added to `problems`, and a wrong key has its default."""
    data = defaults(gpu)
    values = {**data, **_values(own, problems)}
    _, found = parsing.build(BenchConfig, values, BENCH)
    bench = _leave_out(found, values, data, problems)
    bench = _leave_out(list(bench_schema.check(bench)), values, data, problems)
    return _leave_out(_choices(bench, catalog), values, data, problems)


def _leave_out(
    findings: list[Finding], values: dict[str, Any], data: dict[str, Any], problems: list[Problem]
) -> BenchConfig:
    """Add the findings to `problems`, and set the keys that they are about to their defaults, `data`."""
    problems += [finding.problem for finding in findings]
    for key in {key.partition(".")[2] for finding in findings for key in finding.keys}:
        values.pop(key, None)
        values |= {key: data[key]} if key in data else {}
    bench, _ = parsing.build(BenchConfig, values, BENCH)
    assert bench is not None, "the file's own values are right"
    return bench


def _values(own: list[Override], problems: list[Problem]) -> dict[str, Any]:
    """Return the values that the words set. A single value becomes a list of one."""
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
            values[key] = one if key not in LISTS or one is None or isinstance(one, (list, dict)) else [one]
    return values


def _choices(bench: BenchConfig, catalog: Catalog) -> list[Finding]:
    """Find names in the lists that are no choice of their group."""
    found = []
    for group in ("model", "precision", "recipe"):
        options = _options(catalog, group)
        for name in getattr(bench, group):
            if name not in options:
                problem = Problem(*hints.unknown_choice(f"bench.{group}", name, options))
                found.append(Finding((f"bench.{group}",), problem))
    return found
