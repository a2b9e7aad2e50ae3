"""The benchmark's command line: its own settings, and its cases.

Each case is the command line of a run, composed and checked as one, so a key means the same in both programs.
"""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override

from gpt2_fp8.compose.commandline import Program, parse, read, values_of
from gpt2_fp8.compose.composition import BENCH, Catalog, conf_dir, open_catalog
from gpt2_fp8.compose.jobs import Request
from gpt2_fp8.config import disk, hints, parsing
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import Count, Range, Steps, key_paths, show
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
    """What `bench` measures: all combinations of the four lists, with a recipe only if the precision is FP8.

    The defaults are in `conf/bench.yaml`, for a GPU and for a CPU.
    """

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
    """Return the settings and the configuration of each case that a command line asks for.

    `argv` is without the program's name. On a GPU, each model and micro-batch has a case in bf16 under torch.compile,
    unless `bench.baseline=false`. Raises UserError with every problem, each once.
    """
    line = read(argv, PROGRAM)
    own = [word for word in line.overrides if word.key_or_group.partition(".")[0] == BENCH]
    others = [word for word in line.overrides if word not in own]
    given = [word for word in others if _refusal(word) is None]
    problems = [*line.problems, *filter(None, map(_refusal, others))]
    gpu = gpu and not any(word.input_line in ("trainer=cpu", "trainer.accelerator=cpu") for word in given)
    with open_catalog() as catalog:
        problems += catalog.add_folders([line.config_dir] if line.config_dir else [])
        bench = _settings(own, catalog, gpu, problems)
        cases = _Cases(bench, given, catalog, gpu, problems)
        configs = cases.of_rows(bench.rows) if bench.rows is not None else cases.of_combinations()
    if problems:
        raise UserError(problems)
    return bench, configs


def _refusal(override: Override, in_row: bool = False) -> Problem | None:
    """Return why a word that would be right for a run is wrong for a benchmark, or `in_row`, in a row; else None."""
    key, line = override.key_or_group, str(override.input_line)
    value, group = line.partition("=")[2], key.partition(".")[0]
    if key in _HERE:
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
    """Build the `bench` keys. Problems are added to `problems`, and a wrong key has its default."""
    default, values = defaults(gpu), values_of(own, problems)
    values = {key.removeprefix(f"{BENCH}."): value for key, value in values.items()}
    values |= {key: [values[key]] for key in LISTS if isinstance(values.get(key), (str, int))}
    bench = parsing.build_with_defaults(BenchConfig, values, default, problems, BENCH)
    for group in LISTS[:3]:
        options = [name for name in catalog.get_group_options(group) if name != "auto"]  # that is the backend's own
        if unknown := [name for name in getattr(bench, group) if name not in options]:
            problems += [Problem(*hints.unknown_choice(f"bench.{group}", name, options)) for name in unknown]
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


class BenchRow(NamedTuple):
    """A row: its name, and the words of its run."""

    name: str
    words: tuple[str, ...]


def read_rows(file: str, problems: list[Problem], key: str = "bench.rows") -> list[BenchRow]:
    """Return the rows of a file, that `key` names. What is wrong is added to `problems`, each line by its number."""
    rows: dict[str, BenchRow] = {}
    before = len(problems)
    for number, line in enumerate(disk.read_text(key, file, problems).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, rest = (part.strip() for part in line.partition(":"))
        try:
            if not colon or not name or not name.isprintable():
                raise ValueError("it has no name before a colon")
            if name in rows:
                raise ValueError(f"a row above has the name {show(name)}")
            rows[name] = BenchRow(name, tuple(shlex.split(rest, comments=True)))
        except ValueError as error:  # also shlex's
            problems.append(Problem(f"{key}={show(file)}, line {number}: {error}", FORM))
    if not rows and len(problems) == before:
        problems.append(Problem(f"{key}={show(file)} holds no row", FORM))
    return list(rows.values())


class _Case(NamedTuple):
    model: str
    micro_batch_size: int
    precision: str
    recipe: str | None  # None: not FP8

    def has(self, override: Override) -> bool:
        """Return whether a word changes anything in this case: some belong to one precision or recipe."""
        key = override.key_or_group
        tags, group = key_paths(RunConfig).get(key, ()), key.partition(".")[0]
        only_fp8 = group == "recipe" or (key, override.value()) == ("attention", "te")
        if (only_fp8 and self.recipe is None) or (key == "compile_mode" and self.recipe is not None):
            return False
        if key == "cuda_graphs" and self.recipe != "delayed":  # only the fused layers have it
            return False
        return not tags or group not in ("precision", "recipe") or getattr(self, group) in tags

    @property
    def words(self) -> list[str]:
        recipe = [f"recipe={self.recipe}"] if self.recipe else []
        return [f"model={self.model}", f"precision={self.precision}", *recipe]


@dataclass
class _Cases:
    """Composes the cases. What is wrong with any is added to `problems`."""

    bench: BenchConfig
    given: list[Override]
    catalog: Catalog
    gpu: bool
    problems: list[Problem]

    def of_combinations(self) -> list[RunConfig]:
        """Return the configurations of all combinations."""
        bench, done, used = self.bench, [], set()
        for model, size in itertools.product(dict.fromkeys(bench.model), dict.fromkeys(bench.micro_batch_size)):
            cases = [
                _Case(model, size, precision, recipe)
                for precision in dict.fromkeys(bench.precision)
                for recipe in (dict.fromkeys(bench.recipe) if precision.startswith("fp8") else [None])
            ]
            used |= {o.key_or_group for o in self.given for case in cases if case.has(o)}
            group = [config for case in cases for config in self._of_case(case)]
            if self.gpu and bench.baseline and not any(c.precision.name == "bf16" and c.compile for c in group):
                group = [*self._of_case(_Case(model, size, "bf16", None), "compile=true"), *group]
            done += group
        unused = [o.input_line for o in self.given if o.key_or_group not in used]
        self.problems += [Problem(f"{line}: no case of this benchmark has this key") for line in unused]
        return done

    def _of_case(self, case: _Case, *last: str) -> list[RunConfig]:
        given = [str(o.input_line) for o in self.given if case.has(o)]
        return self._compose([*case.words, *given], case.micro_batch_size, last, self.problems)

    def of_rows(self, file: str) -> list[RunConfig]:
        """Return the configuration of each row of a file. The row's name is in its `notes`."""
        done: list[RunConfig] = []
        first = [f"model={self.bench.model[0]}" if self.bench.model else "", *(str(o.input_line) for o in self.given)]
        for row in read_rows(file, self.problems):
            overrides, found = parse(row.words)
            found += [problem for o in overrides if (problem := _refusal(o, in_row=True))]
            sizes = [o.value() for o in overrides if o.key_or_group == "micro_batch_size"]
            size = sizes[-1] if sizes and isinstance(sizes[-1], int) else self.bench.micro_batch_size[0]
            if not found:
                done += [replace(c, notes=row.name) for c in self._compose(first, size, row.words, found)]
            self.problems += [Problem(f"bench.rows, {show(row.name)}: {one.cause}", one.remedy) for one in found]
        return done

    def _compose(
        self, first: list[str], micro_batch_size: int, last: tuple[str, ...], problems: list[Problem]
    ) -> list[RunConfig]:
        """Return the configuration of a run with the benchmark's own sizes, or an empty list if it has problems."""
        sizes = [f"{key}={micro_batch_size}" for key in ("micro_batch_size", "global_batch_size")]
        line = read([*first, *sizes, *last])
        problems += line.problems
        done = []
        for config, _ in Request(line, self.catalog, problems).plan(problems):
            if config.trainer.devices != 1 or config.trainer.num_nodes != 1:
                problems.append(Problem("the benchmark measures one device, and this is a run on several"))
            if not limits(config):
                remedy = "trainer.max_steps=NUMBER in the file that has null"
                problems.append(Problem("the benchmark counts no epochs", remedy))
            model, whole = config.model, self.bench.global_batch_size
            if model.vocab_size is None and model.name.startswith(("gpt2", "llama")):
                model = replace(model, vocab_size=NAMES["gpt2"])  # also if the text has another tokenizer
            if whole is None:
                micro_batches = round(TOKENS_PER_STEP / (micro_batch_size * model.n_positions)) if self.gpu else 1
                whole = micro_batch_size * max(1, micro_batches)
            done.append(replace(config, model=model, global_batch_size=whole))
        return done
