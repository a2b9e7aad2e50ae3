"""The cases of a benchmark: each is the command line of a run, composed and checked as one.

So a key means the same in both programs.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hydra.core.override_parser.types import Override

from gpt2_fp8.compose import configs_of
from gpt2_fp8.compose.commandline import CommandLine, overrides_of
from gpt2_fp8.compose.composition import Catalog
from gpt2_fp8.config import bench_schema, text_file, tokenizer_file
from gpt2_fp8.config.bench_schema import BenchConfig
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import key_paths, show
from gpt2_fp8.config.run_length import limits
from gpt2_fp8.config.schema import RunConfig

FORM = "write NAME: WORDS on each line, such as  fp8: precision=fp8_hybrid recipe=delayed"
_EXAMPLE = "name a text file of rows, such as {}=benchmarks/rows/ablation.txt"
_LONGEST_NAME = 60  # characters


class BenchRow(NamedTuple):
    """A row: its name, and the words of its run."""

    name: str
    words: tuple[str, ...]


def read(file: str, problems: list[Problem], key: str = "bench.rows") -> list[BenchRow]:
    """Return the rows of a file, that `key` names. What is wrong is added to `problems`, each line by its number."""
    rows: list[BenchRow] = []
    before = len(problems)
    for number, line in enumerate(text_file.read(key, file, _EXAMPLE.format(key), problems).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, rest = (part.strip() for part in line.partition(":"))
        reason = None
        if not colon or not name or not name.isprintable() or len(name) > _LONGEST_NAME:
            reason = "it has no name before a colon" if not colon or not name else "its name is too long, or no text"
        elif name in [row.name for row in rows]:
            reason = f"a row above has the name {show(name)}"
        try:
            words = tuple(shlex.split(rest, comments=True))
        except ValueError as error:
            reason = f"its words cannot be read: {error}"
        if reason:
            problems.append(Problem(f"{key}={show(file)}, line {number}: {reason}", FORM))
        else:
            rows.append(BenchRow(name, words))
    if not rows and len(problems) == before:
        problems.append(Problem(f"{key}={show(file)} holds no row", FORM))
    return rows


LISTS = ("model", "precision", "recipe", "micro_batch_size")
HERE = {"trainer.max_steps": "steps", "trainer.profiler": "profile", "global_batch_size": "global_batch_size"}
# A run's keys that change nothing of what is measured.
_MEANINGLESS = (
    *("run_name", "tags", "notes", "ckpt_path", "init_from", "callbacks", "logger", "debug"),
    "data.val_sequences",
    "precision.evaluation",
    "precision.bf16_last_steps",
)
_OF_TRAINER = ("trainer.accelerator", "trainer.deterministic")  # keys of `trainer` that do change it


class _Case(NamedTuple):
    model: str
    micro_batch_size: int
    precision: str
    recipe: str | None  # None: not FP8
    extra: tuple[str, ...] = ()  # words at the end of the command line

    def has(self, override: Override) -> bool:
        """Return whether a word changes anything in this case: some belong to one precision or recipe."""
        key = override.key_or_group
        tags, group = key_paths(RunConfig).get(key, ()), key.partition(".")[0]
        if group == "recipe" and self.recipe is None:
            return False
        if key == "compile_mode" and self.recipe is not None:  # only the plain layers have it
            return False
        if key == "attention" and override.value() == "te" and self.recipe is None:  # the plain layers have it not
            return False
        if key == "cuda_graphs" and self.recipe != "delayed":  # only the fused layers have it
            return False
        return not tags or group not in ("precision", "recipe") or getattr(self, group) in tags

    def words(self, given: Sequence[Override]) -> list[str]:
        """Return the command line of a run that would train this."""
        first = [f"model={self.model}", f"precision={self.precision}", *([f"recipe={self.recipe}"] * bool(self.recipe))]
        sizes = [f"{key}={self.micro_batch_size}" for key in ("micro_batch_size", "global_batch_size")]
        return [*first, *(str(o.input_line) for o in given if self.has(o)), *sizes, *self.extra]


class _Row(NamedTuple):
    model: str
    micro_batch_size: int
    own: tuple[str, ...]  # its words

    def words(self, given: Sequence[Override]) -> list[str]:
        """Return the command line of a run that would train this: the row's words come last."""
        first = [f"model={self.model}", *(str(o.input_line) for o in given)]
        sizes = [f"{key}={self.micro_batch_size}" for key in ("micro_batch_size", "global_batch_size")]
        return [*first, *sizes, *self.own]


def refusal(override: Override) -> Problem | None:
    """Return why a key of a run has no meaning in a benchmark, or None."""
    key, line = override.key_or_group, str(override.input_line)
    if key in HERE:
        return Problem(f"{line}: the benchmark has a key of its own", f"bench.{HERE[key]}=VALUE")
    of_trainer = key.startswith("trainer.") and key in key_paths(RunConfig) and key not in _OF_TRAINER
    if of_trainer or key in _MEANINGLESS or key.partition(".")[0] in _MEANINGLESS:
        return Problem(f"{line}: this changes nothing of what is measured", f"leave {key} out")
    return None


def configs(
    bench: BenchConfig, given: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]
) -> list[RunConfig]:
    """Return the configuration of each case. The problems of all cases are added to `problems`."""
    if bench.rows is not None:
        return _rows(bench, bench.rows, given, catalog, gpu, problems)
    done: list[RunConfig] = []
    used: set[str] = set()
    for model, size in itertools.product(dict.fromkeys(bench.model), dict.fromkeys(bench.micro_batch_size)):
        cases = [
            _Case(model, size, precision, recipe)
            for precision in dict.fromkeys(bench.precision)
            for recipe in (dict.fromkeys(bench.recipe) if precision.startswith("fp8") else [None])
        ]
        used |= {o.key_or_group for o in given for case in cases if case.has(o)}
        group = [config for case in cases for config in _config(bench, case, given, catalog, gpu, problems)]
        if gpu and bench.baseline and not any(config.precision.name == "bf16" and config.compile for config in group):
            baseline = _Case(model, size, "bf16", None, ("compile=true",))
            group = [*_config(bench, baseline, given, catalog, gpu, problems), *group]
        done += group
    for override in given:
        if override.key_or_group not in used:
            remedy = "leave it out, or add to bench.precision or bench.recipe what has it"
            problems.append(Problem(f"{override.input_line}: no case of this benchmark has this key", remedy))
    return done


def _rows(
    bench: BenchConfig, file: str, given: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]
) -> list[RunConfig]:
    """Return the configuration of each row of a file. The row's name is in its `notes`."""
    done: list[RunConfig] = []
    for row in read(file, problems):
        overrides, found = overrides_of(list(row.words))
        found += [problem for o in overrides if (problem := _not_of_a_row(o))]
        sizes = [str(o.value()) for o in overrides if o.key_or_group == "micro_batch_size"]
        size = int(sizes[-1]) if sizes and sizes[-1].isdecimal() else bench.micro_batch_size[0]
        if not found:
            case = _Row(bench.model[0], size, row.words)
            done += [replace(config, notes=row.name) for config in _config(bench, case, given, catalog, gpu, found)]
        problems += [Problem(f"bench.rows, {show(row.name)}: {problem.cause}", problem.remedy) for problem in found]
    return done


def _not_of_a_row(override: Override) -> Problem | None:
    """Return why a word that a run may have is wrong in a row, or None."""
    key, line = override.key_or_group, str(override.input_line)
    if key.startswith("bench.") or override.is_hydra_override():
        return Problem(f"{line} is no word of one run", "give it on the command line, or leave it out")
    if override.is_sweep_override():
        return Problem(f"{line} is several values", "write a row for each")
    return refusal(override)


def _config(
    bench: BenchConfig, case: _Case | _Row, given: list[Override], catalog: Catalog, gpu: bool, problems: list[Problem]
) -> list[RunConfig]:
    """Return a case's configuration with the benchmark's own sizes, or an empty list if it has problems."""
    found: list[Problem] = []
    configs = configs_of(CommandLine(case.words(given)), catalog, found)
    problems += found
    if any(config.trainer.devices != 1 or config.trainer.num_nodes != 1 for config in configs):
        problems.append(Problem("the benchmark measures one device, and this is a run on several", "trainer=gpu"))
    if not all(limits(config) for config in configs):
        problems.append(Problem("the benchmark counts no epochs", "trainer.max_steps=NUMBER in the file that has null"))
    done = []
    for config in configs:
        model = config.model
        if model.vocab_size is None and model.name.startswith(("gpt2", "llama")):
            model = replace(model, vocab_size=tokenizer_file.NAMES["gpt2"])  # also if the text has another tokenizer
        whole = bench_schema.sequences_per_step(bench, case.micro_batch_size, model.n_positions, gpu)
        done.append(replace(config, model=model, global_batch_size=whole))
    return done
