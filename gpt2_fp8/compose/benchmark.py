"""The benchmark's command line: its own settings, and its cases.

Each case is the command line of a run, composed and checked as one, so a key means the same in both programs.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override

from gpt2_fp8.compose.commandline import Program, parse, read, values_of
from gpt2_fp8.compose.composition import BENCH, Catalog, conf_dir, open_catalog
from gpt2_fp8.compose.jobs import Request
from gpt2_fp8.config import disk, parsing
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import Count, Range, Steps, key_paths, show, unknown_choice
from gpt2_fp8.config.run_length import limits
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.tokenizer_file import NAMES

TOKENS_PER_STEP = 131_072  # about; of a step on a GPU
FORM = "write NAME: WORDS on each line, such as  fp8: precision=fp8_hybrid recipe=delayed"
LISTS = ("model", "precision", "recipe", "micro_batch_size")
_HERE = {"trainer.max_steps": "steps", "trainer.profiler": "profile", "global_batch_size": "global_batch_size"}
# A run's keys and groups that change nothing of what is measured, and those of `trainer` that do change it.
_MEANINGLESS = (
    *("run_name", "tags", "notes", "ckpt_path", "init_from", "callbacks", "logger", "debug"),
    *("data.val_sequences", "precision.evaluation", "precision.bf16_last_steps"),
)
_OF_TRAINER = ("trainer", "trainer.accelerator", "trainer.deterministic", "trainer.devices", "trainer.num_nodes")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What `bench` measures: all combinations of the four lists, with a recipe only if the precision is FP8."""

    model: Annotated[list[str], "choices of the group model"]
    precision: Annotated[list[str], "fp32, bf16, fp8_hybrid, fp8_e4m3"]
    recipe: Annotated[list[str], "of the FP8 precisions: delayed, current, rowwise, block, mxfp8"]
    micro_batch_size: Annotated[list[Count], "sequences a forward pass"]
    global_batch_size: Annotated[Count | None, "sequences a step; null: about 131,072 tokens, on a CPU one micro-batch"]
    baseline: Annotated[bool, "on a GPU also bf16 under torch.compile, which the ratios refer to"]
    steps: Annotated[Count, "timed steps"]
    warmup: Annotated[Steps, "steps before them"]
    timeout: Annotated[float, Range(0, 10**8, open_least=True), "seconds that a case may take"]
    profile: Annotated[bool, "also the kernels that a step's time goes to"]
    # instead of the combinations of precision and recipe; the ratios are then to the first row and to the row before
    rows: Annotated[str | None, "a file of lines NAME: WORDS OF A RUN, measured in turn"]


@dataclass(frozen=True, kw_only=True)
class BenchRunConfig(RunConfig):
    """All that the command line of `bench` knows: a run's keys, which hold for every case, and its own."""

    bench: BenchConfig


PROGRAM = Program("python -m gpt2_fp8.bench", BenchRunConfig, flags=("help", "overrides", "config_dir"))
_OWN = tuple(field.name for field in fields(BenchConfig))


def defaults(gpu: bool) -> dict[str, Any]:
    """Return the settings of `conf/bench.yaml`, for a GPU or for a CPU."""
    return dict(yaml.safe_load((conf_dir() / f"{BENCH}.yaml").read_text())["gpu" if gpu else "cpu"])


def preflight(argv: list[str], gpu: bool) -> tuple[BenchConfig, list[RunConfig]]:
    """Return the settings and the configuration of each case of a command line. Raises UserError with every problem."""
    line = read(argv, PROGRAM)
    own = [word for word in line.overrides if word.key_or_group.partition(".")[0] == BENCH]
    others = [word for word in line.overrides if word not in own]
    given = [word for word in others if _refusal(word) is None]
    problems = [*line.problems, *filter(None, map(_refusal, others))]
    gpu = gpu and not any(word.input_line in ("trainer=cpu", "trainer.accelerator=cpu") for word in given)
    with open_catalog() as catalog:
        problems += catalog.add_folders([line.config_dir] if line.config_dir else [])
        bench = _settings(own, catalog, gpu, problems)
        if bench.rows is not None:
            cases = _read_cases(bench, bench.rows, given, problems)
        else:
            cases = _combine(bench, given, gpu, problems)
        configs = [config for case in cases for config in _compose(case, bench, catalog, gpu, problems)]
    if problems:
        raise UserError(problems)
    return bench, configs


def _refusal(override: Override, in_row: bool = False) -> Problem | None:
    """Return why a word that would be right for a run is wrong for a benchmark, or `in_row`, in a row; else None."""
    key, line = override.key_or_group, str(override.input_line)
    value, group = line.partition("=")[2], key.partition(".")[0]
    if key in _HERE and not (in_row and key == "global_batch_size"):
        return Problem(f"{line}: the benchmark has a key of its own", f"bench.{_HERE[key]}=VALUE")
    if key in LISTS and not in_row:
        return Problem(f"{line}: the benchmark goes through a list", f"'bench.{key}=[{value.strip('[]')}]'")
    if key in _OWN and not in_row:
        return Problem(f"there is no key {key}", f"did you mean bench.{key}={value}?")
    of_trainer = group == "trainer" and key not in _OF_TRAINER
    if of_trainer or override.is_hydra_override() or {key, group} & {*_MEANINGLESS, BENCH}:
        return Problem(f"{line}: this changes nothing of what is measured", f"leave {key} out")
    if override.is_sweep_override():
        return Problem(f"{line} is several values", "write a row for each" if in_row else "give one")
    return None


def _settings(own: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]) -> BenchConfig:
    """Build the `bench` keys. A wrong one has its default, after its problem was added to `problems`."""
    default, values = defaults(gpu), values_of(own, problems)
    values = {key.removeprefix(f"{BENCH}."): value for key, value in values.items()}
    values |= {key: [values[key]] for key in LISTS if isinstance(values.get(key), (str, int))}
    bench = parsing.build_with_defaults(BenchConfig, values, default, problems, BENCH)
    for group in LISTS[:3]:
        options = [name for name in catalog.get_group_options(group) if name != "auto"]  # that is the backend's own
        if unknown := [name for name in getattr(bench, group) if name not in options]:
            problems += [Problem(*unknown_choice(f"bench.{group}", name, options)) for name in unknown]
            bench = replace(bench, **{group: default[group]})
    if bench.rows is not None:
        twice = [name for name in ("precision", "recipe", "baseline") if name in values]
        problems += [Problem(f"bench.{name}: the rows of bench.rows have words of their own") for name in twice]
        several = [name for name in ("model", "micro_batch_size") if len(set(getattr(bench, name))) > 1]
        problems += [Problem(f"bench.{name}: the rows of bench.rows are compared on one") for name in several]
    problems += [Problem(f"bench.{name}=[]: nothing to measure") for name in LISTS if not getattr(bench, name)]
    whole = bench.global_batch_size
    if over := [size for size in bench.micro_batch_size if whole is not None and whole % size]:
        cause = f"bench.global_batch_size={whole}: a step does not divide into forward passes of {over[0]}"
        problems.append(Problem(cause))
        return replace(bench, global_batch_size=None)
    return bench


def read_rows(file: str, problems: list[Problem], key: str = "bench.rows") -> dict[str, list[str]]:
    """Return the words of each row of the file that `key` names, by name. Adds what is wrong to `problems`."""
    rows: dict[str, list[str]] = {}

    def add(line: str) -> None:
        name, colon, words = (part.strip() for part in line.partition(":"))
        if not colon or not name or not name.isprintable():
            raise ValueError("it has no name before a colon")
        if name in rows:
            raise ValueError(f"a row above has the name {show(name)}")
        rows[name] = shlex.split(words, comments=True)

    disk.read_lines(key, file, add, problems, FORM, comment="#")
    return rows


class _Case(NamedTuple):
    """The words of a case in front of the benchmark's own sizes, its micro-batch, and the words behind them."""

    first: list[str]
    size: int
    last: Sequence[str] = ()
    name: str = ""  # of a row
    whole: int | None = None  # a row's own global batch


def _combine(bench: BenchConfig, given: list[Override], gpu: bool, problems: list[Problem]) -> list[_Case]:
    """Return a case for each combination. A word that none of them has is added to `problems`."""
    pairs = list(dict.fromkeys(
        (precision, recipe)
        for precision in bench.precision for recipe in (bench.recipe if precision.startswith("fp8") else [""])
    ))  # fmt: skip
    unused = [word.input_line for word in given if not any(_applies(word, *pair) for pair in pairs)]
    problems += [Problem(f"{word}: no case of this benchmark has this key") for word in unused]
    compiled = not any(word.input_line == "compile=false" for word in given)
    baseline = gpu and bench.baseline and not (compiled and "bf16" in bench.precision)
    wanted = [*([("bf16", "", "compile=true")] if baseline else []), *pairs]
    cases = []
    for model, size in itertools.product(dict.fromkeys(bench.model), dict.fromkeys(bench.micro_batch_size)):
        for precision, recipe, *last in wanted:
            words = [f"model={model}", f"precision={precision}", *([f"recipe={recipe}"] if recipe else [])]
            words += [str(word.input_line) for word in given if _applies(word, precision, recipe)]
            cases.append(_Case(words, size, tuple(last)))
    return cases


def _applies(word: Override, precision: str, recipe: str) -> bool:
    """Return whether a case has the key of a word: some belong to one precision or recipe."""
    key = word.key_or_group
    tags, group = key_paths(RunConfig).get(key, ()), key.partition(".")[0]
    if group == "recipe" or (key, word.value()) == ("attention", "te"):
        return bool(recipe) and (not tags or recipe in tags)
    if key == "cuda_graphs":  # only the fused layers have it
        return recipe == "delayed"
    return not (key == "compile_mode" and recipe) and (group != "precision" or not tags or precision in tags)


def _read_cases(bench: BenchConfig, file: str, given: list[Override], problems: list[Problem]) -> list[_Case]:
    first, cases = [f"model={bench.model[0]}" if bench.model else "", *(str(word.input_line) for word in given)], []
    for name, typed in read_rows(file, problems).items():
        words, found = parse(typed)
        found += [problem for word in words if (problem := _refusal(word, in_row=True))]
        sizes = {word.key_or_group: value for word in words if isinstance(value := word.value(), int)}
        size = sizes.get("micro_batch_size", bench.micro_batch_size[0])
        cases += [] if found else [_Case(first, size, typed, name, sizes.get("global_batch_size"))]
        problems += _of_row(name, found)
    return cases


def _of_row(name: str, problems: list[Problem]) -> list[Problem]:
    return [Problem(f"bench.rows, {show(name)}: {one.cause}", one.remedy) if name else one for one in problems]


def _compose(case: _Case, bench: BenchConfig, catalog: Catalog, gpu: bool, problems: list[Problem]) -> list[RunConfig]:
    """Return the configuration of a case, or an empty list if it has problems."""
    line = read([*case.first, f"micro_batch_size={case.size}", f"global_batch_size={case.size}", *case.last])
    found, done = list(line.problems), []
    for config, _ in Request(line, catalog, found).plan(found):
        if config.trainer.devices != 1 or config.trainer.num_nodes != 1:
            found.append(Problem("the benchmark measures one device, and this is a run on several"))
        if not limits(config):
            found.append(Problem("the benchmark counts no epochs", "trainer.max_steps=NUMBER in the file"))
        model, whole = config.model, case.whole or bench.global_batch_size
        if model.vocab_size is None and model.name.startswith(("gpt2", "llama")):
            model = replace(model, vocab_size=NAMES["gpt2"])  # also if the text has another tokenizer
        if whole is None:
            micro_batches = round(TOKENS_PER_STEP / (case.size * model.n_positions)) if gpu else 1
            whole = case.size * max(1, micro_batches)
        done.append(replace(config, model=model, global_batch_size=whole, notes=case.name or config.notes))
    problems += _of_row(case.name, found)
    return done
