"""The evaluation of a trained model: loss, perplexity and bits per byte on any text, in any precision.

python -m gpt2_fp8.evaluate outputs/first
python -m gpt2_fp8.evaluate outputs/first data=text_files data.train_files='[corpus/*.txt]' precision=fp32
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override

from gpt2_fp8.compose import composition
from gpt2_fp8.compose.commandline import Program, list_keys, read, values_of
from gpt2_fp8.compose.composition import Catalog, open_catalog
from gpt2_fp8.config import checks, data_schema, parsing, tokenizer_file
from gpt2_fp8.config.data_schema import FilesData, Mixed, TokenFilesData
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import either, near_names, show, value_of
from gpt2_fp8.config.programs import EvaluateConfig, check_evaluate
from gpt2_fp8.config.schema import FP8PrecisionConfig, RunConfig
from gpt2_fp8.config.shown import line
from gpt2_fp8.runtime import programs

GROUPS = ("data", "precision", "recipe", "trainer")  # whose choices an evaluation takes
KEYS = ("attention", "compile", "compile_mode", "document_mask", "micro_batch_size", "plugins")
_OF_TRAINER = ("trainer.accelerator", "trainer.deterministic")
_OWN = [field.name for field in fields(EvaluateConfig)]

HELP = """\
Evaluates a trained model on the text that it was validated with, or on any other: loss, perplexity, bits per byte.

{keys}

A run's keys change what the checkpoint was trained with: the groups {groups}, and
{others}. The model and its tokenizer are the checkpoint's.

Examples:
  python -m gpt2_fp8.evaluate outputs/first
  python -m gpt2_fp8.evaluate outputs/first checkpoint=best precision=fp32 data.val_sequences=1000
  python -m gpt2_fp8.evaluate outputs/first data=fineweb ranking=hellaswag_val.jsonl out=result.json

docs/evaluate.md says more. Exit codes: 0 done; 1 out could not be written; 2 your input; 3 the loss is not finite;
4 the data source was lost; 130, 141 stopped."""
_LINES = {
    "loss": "{:.6f} nats a token", "perplexity": "{:.4f}", "bits_per_byte": "{:.6f}", "tokens": "{:,}", "bytes": "{:,}",
    "seconds": "{:.2f}", "tokens_per_second": "{:,.0f}", "peak_memory_gb": "{:.2f} GiB",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvaluateRunConfig(RunConfig):
    """All that the command line knows: a run's keys and the program's own."""

    evaluate: EvaluateConfig


_FLAGS = "help", "overrides", "config_dir"
PROGRAM = Program("python -m gpt2_fp8.evaluate", EvaluateRunConfig, _FLAGS, folder="ckpt_path")


@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    if programs.answer_questions(argv, help_text):
        return
    request = read_words(argv)
    from gpt2_fp8.train import trained  # imports torch
    from gpt2_fp8.train.evaluation import evaluate

    assert request.own.ckpt_path is not None, "checked before"
    found = trained.load(request.own.ckpt_path, request.own.checkpoint, request.own.weights)
    config = configuration(request, found.config)
    trained.tokenizer_of(found, config.data.tokenizer, "data.tokenizer=PATH of the one that it was trained with")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results = evaluate(found, config, request.own)
    if request.own.out is not None:
        programs.to_write(request.own.out).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for text in _describe(results):
        print(line(text))


def help_text() -> str:
    """Return the text of `--help`."""
    return HELP.format(keys=list_keys(EvaluateConfig), groups=", ".join(GROUPS), others=", ".join(KEYS))


def _describe(results: dict[str, Any]) -> list[str]:
    reason = f" instead of {results['asked']}: {results['reason']}" if results["reason"] else ""
    apart = "" if results["evaluation"] == results["precision"] else f", evaluation {results['evaluation']}"
    said = [
        f"{'checkpoint':<18} {results['checkpoint']}",
        f"{'weights':<18} {results['weights']}",
        f"{'precision':<18} {results['precision']}{apart}{reason}",
        f"{'layers':<18} {results['kernels']['layers']}, on {results['device']}",
        f"{'data':<18} {results['data']}, {results['sequences']:,} sequences",
    ]
    for name, form in _LINES.items():
        shown = name.removesuffix("_gb")
        said.append(f"{shown:<18} {'none' if results[name] is None else form.format(results[name])}")
    said += [f"{'loss of ' + name:<18} {loss:.6f}" for name, loss in results.get("sources", {}).items()]
    if ranking := results.get("ranking"):
        said.append(f"{'ranking':<18} {ranking['items']:,} items")
        said += [f"{name:<18} {ranking[name]:.4f} ± {ranking[name + '_stderr']:.4f}" for name in ("acc", "acc_norm")]
    return said


# ---- the configuration: words on top of what a checkpoint holds ------------------------------------------------------
# A choice (`data=fineweb`) replaces a group by what a run would have; `group.key=value` changes a key of what is there.


class Request(NamedTuple):
    """A command line: the program's own settings, the words that are about a run's keys, and what is wrong so far."""

    own: EvaluateConfig
    words: list[Override]
    config_dir: str | None
    problems: list[Problem]


def read_words(argv: list[str]) -> Request:
    """Read a command line. Raises UserError if the model is not there; other problems wait for those that it shows."""
    line = read(argv, PROGRAM)
    problems = list(line.problems)
    given = values_of([word for word in line.overrides if word.key_or_group in _OWN], problems)
    own = parsing.build_with_defaults(EvaluateConfig, given, vars(EvaluateConfig()), problems)
    problems += (found := check_evaluate(own))
    if any("ckpt_path" in problem.cause for problem in found):
        raise UserError(problems)
    return Request(own, [word for word in line.overrides if word.key_or_group not in _OWN], line.config_dir, problems)


def configuration(request: Request, trained: RunConfig) -> RunConfig:
    """Return the configuration of an evaluation of what was `trained`. Raises UserError with every problem."""
    problems, plain = list(request.problems), copy.deepcopy(asdict(trained))
    with open_catalog() as catalog:
        problems += catalog.add_folders([request.config_dir] if request.config_dir else [])
        choices = [word for word in request.words if catalog.is_group(word)]
        _choose(choices, catalog, plain, problems)
    values = values_of([word for word in request.words if word not in choices], problems)
    for key, value in values.items():
        above, _, last = key.rpartition(".")
        if above.rpartition(".")[0] == "data.validation":
            plain["data"]["validation"].setdefault(above.rpartition(".")[2], {})
        place = value_of(plain, above) if above else plain
        if _takes(key) and isinstance(place, dict):
            place[last] = value
        else:
            near = either(near_names(key, [*_OWN, *GROUPS, *KEYS]))
            cause = f"{key}={show(value)}: this is no key of an evaluation"
            problems.append(Problem(cause, f"did you mean {near}?" if near else ""))
    config, found = parsing.build(RunConfig, plain)
    problems += found
    if config is not None:
        config = _for_evaluation(config, {*values, *(word.key_or_group for word in choices)})
        problems += _check(config, trained)
    if problems or config is None:
        raise UserError(problems)
    return config


def _takes(key: str) -> bool:
    of_group = "." in key and key.partition(".")[0] in GROUPS[:3] and key != "precision.bf16_last_steps"
    return of_group or key in (*KEYS, *_OF_TRAINER)


def _choose(choices: list[Override], catalog: Catalog, plain: dict[str, Any], problems: list[Problem]) -> None:
    """Put chosen groups into `plain`. Of the trainer only the device is taken; text keeps the model's tokenizer."""
    taken = []
    for word in choices:
        group, line = word.key_or_group, str(word.input_line)
        if group not in GROUPS:
            problems.append(Problem(f"{line}: an evaluation takes {either(GROUPS)}"))
        elif found := list(composition.check_override(word, catalog, multirun=False)):
            problems += found
        elif line == "trainer=ddp":
            problems.append(Problem(f"{line}: an evaluation is of one device"))
        else:
            taken.append(word)
    if not taken:  # what the checkpoint itself holds, which may be a stranger's, is never resolved
        return
    cfg = catalog.compose([*(str(word.input_line) for word in taken), f"seed={plain['seed']}"])
    composed, before = composition.to_plain(cfg), plain["data"]
    for group in {word.key_or_group for word in taken} - {"trainer"}:
        plain[group] = composed[group]
    if any(word.key_or_group == "trainer" for word in taken):
        plain["trainer"]["accelerator"] = composed["trainer"]["accelerator"]
    tokenizer = next(iter(before.get("sources", {"": before}).values()))["tokenizer"]
    for source in plain["data"].get("sources", {"": plain["data"]}).values():
        source["tokenizer"] = tokenizer


def _for_evaluation(config: RunConfig, typed: set[str]) -> RunConfig:
    """Return a configuration as one that only validates, on one device. `typed`: what the command line sets.

    It saves, logs, calls and begins from nothing; `plugins` are those of the command line alone. It evaluates in FP8 if
    words have named how: a precision, its layers, a recipe.
    """
    trainer = replace(
        config.trainer, devices=1, num_nodes=1, strategy="auto", shard=None, reshard=None, gather=None,
        fast_dev_run=False, profiler=None,
    )  # fmt: skip
    whole, size, precision = config.global_batch_size, config.micro_batch_size, config.precision
    if "micro_batch_size" in typed and isinstance(size, int):
        whole = -(-whole // size) * size  # nobody trains on it
    callbacks = replace(
        config.callbacks, extra=[], ranking=None, ranking_every_n_steps=0,
        early_stopping_patience=None, early_stopping_min_delta=0.0,
    )  # fmt: skip
    of_fp8 = {key for key in typed if key.partition(".")[0] in ("precision", "recipe")} - {"precision.fallback"}
    if of_fp8 and "precision.evaluation" not in typed and isinstance(precision, FP8PrecisionConfig):
        precision = replace(precision, evaluation="fp8")
    return replace(
        config, precision=precision, trainer=trainer, callbacks=callbacks,
        logger=replace(config.logger, extra=[]), global_batch_size=whole, ckpt_path=None, init_from=None,
        plugins=config.plugins if "plugins" in typed else [], cuda_graphs="auto",
    )  # fmt: skip


def _check(config: RunConfig, trained: RunConfig) -> list[Problem]:
    named = data_schema.sources_of(config.data)
    sources = [_train_on_validated(source) for _, source in named]
    unsaid = {"model.vocab_size"}
    for (name, source), checked in zip(named, sources, strict=True):
        if checked is not source:  # what is wrong with these files is said of val_files
            unsaid.add(f"data.sources.{name}.train_files" if name else "data.train_files")
    trained_on = replace(config, data=data_schema.with_sources(config.data, sources)) if sources else config
    found = [problem for problem in checks.check(trained_on) if not unsaid & set(problem.keys)]
    if config.micro_batch_size == "auto":
        found.append(Problem("micro_batch_size=auto: only a run looks for the largest", "micro_batch_size=8"))
    if not named or config.data.val_sequences == 0:
        found.append(Problem("data.val_sequences=0: there is nothing to evaluate", "data.val_sequences=256"))
    if named and trained.data.tokenizer in tokenizer_file.NAMES and config.data.tokenizer != trained.data.tokenizer:
        cause = f"data.tokenizer={show(config.data.tokenizer)}: the model was trained on the ids of "
        found.append(Problem(cause + trained.data.tokenizer))
    return found


def _train_on_validated(source: Mixed) -> Mixed:
    """Return a source of files as a run's checks want it, with files to train on: an evaluation may leave them out."""
    if isinstance(source, (FilesData, TokenFilesData)) and source.val_files and not source.train_files:
        return replace(source, train_files=source.val_files)
    return source


if __name__ == "__main__":
    sys.exit(programs.main("evaluate", main))
