"""The keys of `evaluate`: its own, and which of a run's change anything in an evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

from gpt2_fp8.config import checks, mixture, ranking_file, tokenizer_file, trained_folder
from gpt2_fp8.config.data_schema import FilesData, Mixed, TokenFilesData
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.generate_schema import check_out
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig, PlainPrecisionConfig
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.trained_folder import Which

Precision = PlainPrecisionConfig | FP8PrecisionConfig
GROUPS = ("data", "precision", "recipe", "trainer")  # whose choices an evaluation takes
KEYS = ("attention", "compile", "compile_mode", "document_mask", "micro_batch_size", "plugins")
_OF_TRAINER = ("trainer.accelerator", "trainer.deterministic")
_OF_TRAINING = ("precision.bf16_last_steps",)  # of the groups that an evaluation takes
_LEFT_OUT = {"precision.fast_accumulation": "false"}  # what they are in a run without them


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The program's own keys. `--help` shows the text beside each type."""

    ckpt_path: Annotated[str | None, "a run's folder, or a checkpoint's"] = None
    checkpoint: Annotated[Which, "of a run: its last checkpoint, or the one of the lowest validation loss"] = "last"
    ranking: Annotated[str | None, "also rank endings: a file of HellaSwag's form, JSON lines"] = None
    out: Annotated[str | None, "a file for the results, as JSON"] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateRunConfig(RunConfig):
    """All that the command line knows: a run's keys and its own."""

    evaluate: EvaluateConfig


def check(own: EvaluateConfig) -> list[Problem]:
    """List what is wrong with the program's own keys, as far as it is known without the model."""
    found = list(trained_folder.check(own.ckpt_path, own.checkpoint))
    if own.out is not None:
        found += [
            Problem(cause, remedy.replace(".jsonl", ".json"))
            for cause, remedy in check_out(own.out, ranking=own.ranking)
        ]
    if own.ranking is not None:
        ranking_file.read(own.ranking, found)
    return found


def refusal(key: str, line: str) -> Problem | None:
    """Return why a key that a run has means nothing here; None if it means something, or if no run has it."""
    group = key.partition(".")[0]
    if group == "model":
        return Problem(f"{line}: the model is the checkpoint's", f"leave {key} out")
    meant = key in KEYS or key in _OF_TRAINER or key in GROUPS or group in GROUPS[:3]
    if meant and key not in _OF_TRAINING:
        return None
    return Problem(f"{line}: this changes nothing of an evaluation", f"leave {key} out")


def for_evaluation(config: RunConfig, typed: set[str]) -> RunConfig:
    """Return the configuration that a checkpoint holds, with what was typed on it, as one that only validates.

    `typed`: the groups and keys of the command line.

    It is of one device, and text to validate on is enough. Whatever it would save, log, call or begin from is left out;
    so is code that the checkpoint names, which only the command line may, and the graphs of a step's micro-batches,
    which not every precision has.
    """
    trainer = replace(config.trainer, devices=1, num_nodes=1, strategy="auto", fast_dev_run=False, profiler=None)
    callbacks, logger = replace(config.callbacks, extra=[]), replace(config.logger, extra=[])
    whole, size = config.global_batch_size, config.micro_batch_size
    if "micro_batch_size" in typed and isinstance(size, int):
        whole = -(-whole // size) * size  # nobody trains on it
    return replace(
        config, precision=_precision(config, typed), trainer=trainer, callbacks=callbacks, logger=logger,
        global_batch_size=whole, ckpt_path=None, init_from=None, plugins=config.plugins if "plugins" in typed else [],
        cuda_graphs="auto",
    )  # fmt: skip


def _precision(config: RunConfig, typed: set[str]) -> Precision:
    """Return the precision; it evaluates in FP8 if words have named how: a precision, its layers, a recipe.

    `precision.evaluation` among them decides by itself.
    """
    precision = config.precision
    of_fp8 = {key for key in typed if key.partition(".")[0] in ("precision", "recipe")} - {"precision.fallback"}
    if not of_fp8 or "precision.evaluation" in typed or not isinstance(precision, FP8PrecisionConfig):
        return precision
    return replace(precision, evaluation="fp8")


def _validated_on(source: Mixed) -> Mixed:
    """Return a source of files as a run's checks want it, which is trained on too: here that may be left out."""
    if isinstance(source, (FilesData, TokenFilesData)) and source.val_files and not source.train_files:
        return replace(source, train_files=source.val_files)
    return source


def check_run(config: RunConfig, trained: RunConfig) -> list[Problem]:
    """List what is wrong with the configuration of an evaluation. `trained`: the one of the checkpoint."""
    named = mixture.sources_of(config.data)
    sources = [_validated_on(source) for _, source in named]
    looked_at = replace(config, data=mixture.with_sources(config.data, sources)) if sources else config
    unsaid = {"model.vocab_size"}
    for (name, source), looked in zip(named, sources, strict=True):
        if looked is not source:  # what is wrong with these files is said of val_files
            unsaid.add(f"data.sources.{name}.train_files" if name else "data.train_files")
    found = [finding.problem for finding in checks.check(looked_at) if not unsaid & set(finding.keys)]
    if config.micro_batch_size == "auto":
        found.append(Problem("micro_batch_size=auto: only a run looks for the largest", "micro_batch_size=8"))
    if not mixture.sources_of(config.data) or config.data.val_sequences == 0:
        found.append(Problem("data.val_sequences=0: there is nothing to evaluate", "data.val_sequences=256"))
    return [*found, *_tokenizer(config, trained)]


def of_checkpoint(problem: Problem, typed: set[str]) -> Problem:
    """Say what to type where a run's remedy is to leave a key out that nobody has typed: the checkpoint has it."""
    remedy = problem.remedy
    for key, value in _LEFT_OUT.items():
        if key not in typed:
            remedy = remedy.replace(f"leave {key} out", f"{key}={value}")
    return Problem(problem.cause, remedy)


def in_own_words(problem: Problem) -> Problem:
    """Say a run's problem for an evaluation: nothing is trained on, and without sequences nothing is evaluated."""
    remedy = re.sub(r"(, or|; or do without:) data\S*\.val_sequences=0.*", "", problem.remedy)
    remedy = remedy.removesuffix(", or make model.n_positions smaller")  # the model is the checkpoint's
    remedy = ", or ".join(way for way in remedy.split(", or ") if not way.startswith("model.")) or remedy
    problem = Problem(problem.cause.replace("the training text is", "the text to evaluate on is"), remedy)
    if problem.cause.startswith("data.train_files is empty") or "nothing to train on" in problem.cause:
        cause = problem.cause.replace("train_files", "val_files").replace("train on", "evaluate")
        return Problem(cause, problem.remedy.replace("train_files", "val_files").replace("_train_", "_val_"))
    return problem


def _tokenizer(config: RunConfig, trained: RunConfig) -> list[Problem]:
    """Find a tokenizer that is not the model's."""
    if not mixture.sources_of(config.data):
        return []
    name, before = config.data.tokenizer, trained.data.tokenizer
    if before in tokenizer_file.NAMES and name != before:
        cause = f"data.tokenizer={show(name)}: the model was trained on the ids of {before}"
        return [Problem(cause, f"leave it out, or data.tokenizer={before}")]
    try:
        ids, has = tokenizer_file.number_of_ids(name), checks.vocabulary(trained)
    except UserError:  # said by the paths' check
        return []
    if ids > has:
        cause = f"data.tokenizer={show(name)} has {ids:,} ids, and the model {has:,}"
        return [Problem(cause, "data.tokenizer=PATH of the one that it was trained with")]
    return []
