"""What no single number can tell: names, and keys that must fit each other. Nothing here looks at the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from gpt2_fp8.config import (
    backend_support,
    hf_config,
    kept_layers,
    mixture,
    model_checks,
    paths,
    run_length,
    tokenizer_file,
)
from gpt2_fp8.config.data_schema import HubData, MixtureData
from gpt2_fp8.config.errors import Finding, UserError
from gpt2_fp8.config.keys import finding, value_of
from gpt2_fp8.config.model_checks import products, width_multiple
from gpt2_fp8.config.schema import RunConfig

_NOT_IN_A_PROJECT = re.compile(r"[/\\#?%:]")  # W&B's own rule
_LONGEST_PROJECT = 128  # likewise
_STORES = ("http://", "https://", "sqlite:///", "file:", "postgresql", "mysql", "mssql", "databricks")
_SQL = ("sqlite", "postgresql", "mysql", "mssql")


def vocabulary(config: RunConfig) -> int:
    """Return how many ids a model has: its own number, or its tokenizer's if it has none."""
    return config.model.vocab_size or tokenizer_file.number_of_ids(config.data.tokenizer)


def check(config: RunConfig, but_paths: bool = False) -> list[Finding]:
    """List what is wrong with a configuration whose types and ranges are right. Reads the disk, writes nothing.

    `but_paths`: it may be for another machine.
    """
    if isinstance(config.data, MixtureData) and not config.data.sources:  # no tokenizer, which other checks ask for
        return list(mixture.check(config))
    found = [*_names(config), *([] if but_paths else paths.check(config))]
    for across in _ACROSS:
        found += across(config)
    return found


def check_batch(config: RunConfig, world_size: int) -> None:
    """Raise UserError if the ranks cannot share a step's sequences equally.

    `world_size` is known late if `trainer.devices=auto`.
    """
    if found := list(_batch(config, world_size)):
        raise UserError(finding.problem for finding in found)


def _names(config: RunConfig) -> Iterator[Finding]:
    yield from kept_layers.check(config)
    for name, source in mixture.sources_of(config.data):
        for found in _names_of_source(replace(config, data=source)):
            yield mixture.found_in(found, name)
    for name in config.plugins:  # they are not imported here, since they import torch
        module = name.partition(".")[0]
        if not module.isidentifier() or not (find_spec(module) or PathFinder.find_spec(module, [""])):
            yield Finding.of("plugins", f"plugins: there is no module {name}")
    for key in () if config.plugins else ("callbacks.extra", "logger.extra", "optimizer.factory", "recipe.factory"):
        if value_of(config, key):
            yield finding(config, key, "is registered by no plugin")


def _names_of_source(config: RunConfig) -> Iterator[Finding]:
    if not config.plugins and value_of(config, "data.source"):
        yield finding(config, "data.source", "is registered by no plugin")
    for key in ("data.repo", "data.revision", "data.text_column", "data.path"):
        if value_of(config, key) == "":
            yield finding(config, key, "is empty")
    if isinstance(config.data, HubData) and not config.data.train_files:
        yield finding(config, "data.train_files", "names no file")


def _vocabulary(config: RunConfig) -> Iterator[Finding]:
    """Compare the tokenizer's ids with the model's, and the model with the Hugging Face folder that it begins from."""
    tokens, vocab_size = None, config.model.vocab_size
    with suppress(UserError):  # `paths` says it
        tokens = tokenizer_file.number_of_ids(config.data.tokenizer)
    if config.init_from and hf_config.is_folder(config.init_from):
        yield from hf_config.check_model(config.model, tokens, Path(config.init_from).expanduser())
    elif vocab_size is not None and tokens is not None and vocab_size < tokens:
        yield finding(config, "model.vocab_size data.tokenizer", f"the tokenizer has {tokens} tokens")


def _without_effect(config: RunConfig) -> Iterator[Finding]:
    """Find keys of the schedule and of the trainer that do nothing beside others."""
    optim, trainer = config.optim, config.trainer
    if optim.schedule == "constant" and optim.min_lr_ratio != 1:
        reason = "the rate stays at the peak after the warm-up"
        yield finding(config, "optim.schedule optim.min_lr_ratio", reason, "optim.min_lr_ratio=1")
    if optim.decay_steps is not None and optim.schedule != "warmup_stable_decay":
        yield finding(config, "optim.schedule optim.decay_steps", "it decays in all steps, or in none")
    if trainer.fast_dev_run and config.ckpt_path is not None:
        reason = "the one step that it takes is a new run's first, and continues none"
        yield finding(config, "trainer.fast_dev_run ckpt_path", reason)


def _known_batch(config: RunConfig) -> Iterator[Finding]:
    devices = 1 if config.trainer.devices == "auto" else config.trainer.devices  # auto: at least; see check_batch
    yield from _batch(config, devices * config.trainer.num_nodes)


def _batch(config: RunConfig, world_size: int) -> Iterator[Finding]:
    whole = config.global_batch_size
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    if whole % (micro * world_size):
        over = f"{micro} on each of {world_size} devices" if world_size > 1 else f"{micro}"
        keys = "global_batch_size micro_batch_size" + (" trainer.devices trainer.num_nodes" if world_size > 1 else "")
        yield finding(config, keys, f"a step of {whole} sequences does not divide into forward passes of {over}")


def _widths(config: RunConfig) -> Iterator[Finding]:
    """Check the format, and the tokens of one sequence, which may be a forward pass by itself.

    A sample is one, and so are the last sequences of a validation.
    """
    if config.precision.name == "fp8_e5m2":
        reason = (
            "a forward product would be E5M2 x E5M2, which the FP8 matrix units' library (cuBLASLt) does not offer and "
            "Transformer Engine refuses; two bits of mantissa are too few for activations and weights"
        )
        yield Finding.of("precision", f"precision=fp8_e5m2: {reason}", "precision=fp8_hybrid")
    multiple = width_multiple(config)
    if config.model.n_positions % multiple:
        reason = f"{products(config)} need sequences of a multiple of {multiple} tokens"
        yield finding(config, "model.n_positions", reason)


def check_logger(config: RunConfig) -> Iterator[Finding]:
    """Find what is wrong with `logger`. Libraries are looked for, not imported."""
    logger = config.logger
    if logger.histograms_every_n_steps and not (logger.tensorboard or logger.wandb):
        yield finding(config, "logger.histograms_every_n_steps", "only TensorBoard and W&B show histograms")
    if logger.wandb is not None:
        yield from _missing("wandb", ["wandb"])
        for key in ("project", "entity", "group"):
            value = getattr(logger.wandb, key)
            if value is not None and not value.strip():
                yield finding(config, f"logger.wandb.{key}", "is empty")
        project = logger.wandb.project
        if _NOT_IN_A_PROJECT.search(project) or len(project) > _LONGEST_PROJECT:
            reason = f"W&B's names of projects have up to {_LONGEST_PROJECT} characters, and none of / \\ # ? % :"
            yield finding(config, "logger.wandb.project", reason)
    if logger.mlflow is not None:
        uri = logger.mlflow.tracking_uri
        yield from _missing("mlflow", ["mlflow", *(["sqlalchemy"] if uri is None or uri.startswith(_SQL) else [])])
        if not logger.mlflow.experiment.strip():
            yield finding(config, "logger.mlflow.experiment", "is empty")
        if uri is not None and not uri.startswith(_STORES):
            yield finding(config, "logger.mlflow.tracking_uri", "is no address that MLflow knows")


def _missing(name: str, libraries: list[str]) -> Iterator[Finding]:
    if absent := [library for library in libraries if find_spec(library) is None]:
        cause = f"logger={name}: the library {absent[0]}, which it needs, is not installed"
        yield Finding.of(f"logger.{name}", cause, f'pip install -e ".[{name}]"')


_ACROSS: tuple[Callable[[RunConfig], Iterator[Finding]], ...] = (
    mixture.check,
    model_checks.check,
    _vocabulary,
    run_length.check,
    _without_effect,
    _known_batch,
    _widths,
    backend_support.check,
    mixture.check_borders,
    check_logger,
)
