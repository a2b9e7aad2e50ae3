"""What no single number can tell: names, and keys that must fit each other. Nothing here looks at the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from gpt2_fp8.config import (
    backend_support,
    block_spec,
    data_schema,
    disk,
    hf_config,
    kept_layers,
    programs,
    run_length,
    sharding,
    text_files,
    tokenizer_file,
)
from gpt2_fp8.config.data_schema import FilesData, Mixed, TokenFilesData
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import problem, show, value_of
from gpt2_fp8.config.schema import FP8PrecisionConfig, RunConfig

FP8_MULTIPLE = 16  # cuBLASLt's FP8 products need every leading dimension to be a multiple of 16 (TE cublaslt_gemm.cu)
_MULTIPLES = {"mxfp8": 32}  # its casts want whole blocks of 32, along rows and columns (TE mxfp8_tensor.py)
_SHAPE = ["n_embd", "n_head", "n_kv_head", "head_size"]
_ROPE = ["rope_base", "rope_scaling", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions"]

_SWITCHED_OFF = {  # a key that has no effect where another one has this value, and does no harm unless it was typed
    "callbacks.sample_prompt": ("callbacks.sample_tokens", 0),
    "callbacks.fp8_health_every_n_steps": ("callbacks.fp8_health", False),
    "callbacks.divergence_steps": ("callbacks.divergence_sigma", 0),
}
_SQL = ("sqlite", "postgresql", "mysql", "mssql")


def vocabulary(config: RunConfig) -> int:
    """Return how many ids a model has: its own number, or its tokenizer's if it has none."""
    return config.model.vocab_size or tokenizer_file.number_of_ids(config.data.tokenizer)


def check(config: RunConfig, but_paths: bool = False) -> list[Problem]:
    """List what is wrong with settings whose types and ranges are right. `but_paths`: they may be another machine's."""
    if (
        isinstance(config.data, data_schema.MixtureData) and not config.data.sources
    ):  # no tokenizer, which other checks ask for
        return list(data_schema.check_mixture(config.data))
    checkers = _ACROSS if but_paths else (_check_paths, *_ACROSS)
    return [problem for checker in checkers for problem in checker(config)]


def check_typed(config: RunConfig, typed: Container[str]) -> Iterator[Problem]:
    """Find keys that were `typed` and have no effect."""
    for key, (switch, off) in _SWITCHED_OFF.items():
        if key in typed and value_of(config, switch) == off:
            yield problem(config, f"{key} {switch}", "with the second the first has no effect")
    if "data.val_fraction" in typed and getattr(config.data, "val_files", None):
        yield problem(config, "data.val_fraction data.val_files", "with the second the first has no effect")


def check_batch(config: RunConfig, world_size: int) -> None:
    """Raise UserError if ranks, whose number `trainer.devices=auto` tells late, cannot share a step or a model."""
    if found := [*_check_batch(config, world_size), *sharding.check_ranks(config, world_size)]:
        raise UserError(found)


def _names(config: RunConfig) -> Iterator[Problem]:
    for name, source in data_schema.sources_of(config.data):
        if isinstance(source, data_schema.RegisteredData) and not config.plugins:
            yield data_schema.as_named(problem(source, "source", "is registered by no plugin", prefix="data."), name)
    for name in config.plugins:  # they are not imported here, since they import torch
        module = name.partition(".")[0]
        if not module.isidentifier() or not (find_spec(module) or PathFinder.find_spec(module, [""])):
            yield Problem(f"plugins: there is no module {name}", keys=("plugins",))
    for key in () if config.plugins else ("callbacks.extra", "logger.extra", "optimizer.factory", "recipe.factory"):
        if value_of(config, key):
            yield problem(config, key, "is registered by no plugin")


def _vocabulary(config: RunConfig) -> Iterator[Problem]:
    """Compare the tokenizer's ids with the model's, and the model with the Hugging Face folder that it begins from."""
    tokens, vocab_size = None, config.model.vocab_size
    with suppress(UserError):  # `_check_paths` says it
        tokens = tokenizer_file.number_of_ids(config.data.tokenizer)
    if config.init_from and hf_config.is_folder(config.init_from):
        yield from hf_config.check_model(config.model, tokens, Path(config.init_from).expanduser())
    elif vocab_size is not None and tokens is not None and vocab_size < tokens:
        yield problem(config, "model.vocab_size data.tokenizer", f"the tokenizer has {tokens} tokens")


def _without_effect(config: RunConfig) -> Iterator[Problem]:
    optim, trainer = config.optim, config.trainer
    if optim.schedule == "constant" and optim.min_lr_ratio != 1:
        reason = "the rate stays at the peak after the warm-up"
        yield problem(config, "optim.schedule optim.min_lr_ratio", reason, "optim.min_lr_ratio=1")
    if optim.decay_steps is not None and optim.schedule != "warmup_stable_decay":
        yield problem(config, "optim.schedule optim.decay_steps", "it decays in all steps, or in none")
    if optim.ema_start_step and optim.ema_decay is None:
        yield problem(config, "optim.ema_start_step optim.ema_decay", "there is no average of weights to begin")
    yield from _without_validation(config)
    if trainer.fast_dev_run and config.ckpt_path is not None:
        reason = "the one step that it takes is a new run's first, and continues none"
        yield problem(config, "trainer.fast_dev_run ckpt_path", reason)
    if trainer.fast_dev_run and trainer.profiler is not None:
        yield problem(config, "trainer.fast_dev_run trainer.profiler", "a single step writes nothing")


def _without_validation(config: RunConfig) -> Iterator[Problem]:
    """Find what is asked for after validations that are not made, or that nothing asks for."""
    asked, interval = config.callbacks, config.trainer.val_check_interval
    for key, details in (("early_stopping_patience", "early_stopping_min_delta"), ("ranking", "ranking_every_n_steps")):
        given = getattr(asked, key) is not None
        if given and config.data.val_sequences == 0:
            yield problem(config, f"callbacks.{key} data.val_sequences", "nothing is validated")
        if not given and getattr(asked, details):
            yield problem(config, f"callbacks.{details} callbacks.{key}", "without the second the first has no effect")
    if asked.ranking_every_n_steps % interval:
        keys = "callbacks.ranking_every_n_steps trainer.val_check_interval"
        yield problem(config, keys, "it is ranked after validations, so the first must be a multiple of the second")


def _check_batch(config: RunConfig, world_size: int) -> Iterator[Problem]:
    whole = config.global_batch_size
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    if whole % (micro * world_size):
        over = f"{micro} on each of {world_size} devices" if world_size > 1 else f"{micro}"
        keys = "global_batch_size micro_batch_size" + (" trainer.devices trainer.num_nodes" if world_size > 1 else "")
        yield problem(config, keys, f"a step of {whole} sequences does not divide into forward passes of {over}")


def _shape(config: RunConfig) -> Iterator[Problem]:
    """Find keys of the model that do not fit each other, and widths that FP8 cannot multiply."""
    model, unused = config.model, [key for key in _ROPE if getattr(config.model, key) is not None]
    missing = [key for key in _ROPE[1:] if getattr(model, key) is None]
    if model.positions != "rope" and unused:
        reason = f"model.positions={model.positions} has no rotations"
        yield problem(model, " ".join(unused), reason, prefix="model.")
    elif {*unused} & {*_ROPE[2:]} and missing:
        needed = " and ".join(f"model.{key}" for key in missing)
        yield problem(model, " ".join(unused), f"Llama 3's scaling also needs {needed}", prefix="model.")
    try:
        block = block_spec.block_spec(model)
    except ValueError as error:
        keys = [key for key in (*_SHAPE, *_ROPE[2:]) if getattr(model, key) is not None]
        yield problem(model, " ".join([*keys, "positions"]), str(error), prefix="model.")
        return
    if not isinstance(config.precision, FP8PrecisionConfig):
        return
    multiple = _MULTIPLES.get(config.recipe.name, FP8_MULTIPLE)
    sizes = {"n_embd": block.n_embd, "n_head": block.heads.queries, "n_kv_head": 2 * block.heads.keys}
    sizes = sizes if block.n_embd % multiple == 0 else {"n_embd": block.n_embd}
    # a sequence may be a forward pass by itself: a sample, or the last of a validation
    for key, size in (sizes | {"mlp_width": block.mlp.width, "n_positions": model.n_positions}).items():
        if size % multiple:
            reason = f"FP8 (recipe={config.recipe.name}) needs a multiple of {multiple}, and this is {size}"
            yield problem(model, key, reason, prefix="model.")


def check_logger(config: RunConfig) -> Iterator[Problem]:
    """Find what is wrong with `logger`. Libraries are looked for, not imported."""
    logger = config.logger
    if logger.histograms_every_n_steps and not (logger.tensorboard or logger.wandb):
        yield problem(config, "logger.histograms_every_n_steps", "only TensorBoard and W&B show histograms")
    if logger.wandb is not None:
        yield from _find_missing("wandb", ["wandb"])
    if logger.mlflow is not None:
        uri = logger.mlflow.tracking_uri
        yield from _find_missing("mlflow", ["mlflow", *(["sqlalchemy"] if uri is None or uri.startswith(_SQL) else [])])


def _find_missing(name: str, libraries: list[str]) -> Iterator[Problem]:
    if absent := [library for library in libraries if find_spec(library) is None]:
        cause = f"logger={name}: the library {absent[0]}, which it needs, is not installed"
        yield Problem(cause, f'pip install -e ".[{name}]"', (f"logger.{name}",))


# ---- names and paths, and whether something is there -----------------------------------------------------------------


def _check_paths(config: RunConfig) -> Iterator[Problem]:
    yield from _check_run_name(config.run_name)
    yield from _check_checkpoints(config)
    if config.callbacks.ranking is not None:
        problems: list[Problem] = []
        programs.read_ranking(config.callbacks.ranking, problems, "callbacks.ranking")
        yield from problems
    for name, source in data_schema.sources_of(config.data):
        yield from (data_schema.as_named(problem, name) for problem in _check_source(source))
    for name, source in data_schema.sets_of(config.data):
        if isinstance(source, (FilesData, TokenFilesData)):
            yield from (data_schema.as_of_set(problem, name) for problem in _check_files(source))


def _check_run_name(name: str) -> Iterator[Problem]:
    reason = None
    if not name.strip() or name != name.strip() or not name.isprintable():
        reason = "is no plain name"
    elif name.startswith(("/", "~")) or "\\" in name or {"..", "."} & {*PurePosixPath(name).parts, name}:
        reason = "leads out of outputs/"
    if reason:
        cause = f"run_name={show(name)}: {reason}"
        yield Problem(cause, "hydra.run.dir=FOLDER puts a run elsewhere", ("run_name",))


def _check_checkpoints(config: RunConfig) -> Iterator[Problem]:
    if config.ckpt_path is not None and config.init_from is not None:
        yield problem(config, "ckpt_path init_from", "one continues a run, the other starts one from weights")
    for key, value in (("ckpt_path", config.ckpt_path), ("init_from", config.init_from)):
        if value is None or (key == "ckpt_path" and value in ("last", "best")):
            continue
        path, example = Path(value).expanduser(), f"{key}=outputs/RUN/checkpoints/step-NNNNNNNN"
        example += ", or a folder of save_pretrained" if key == "init_from" else ""
        if not value or not path.is_dir():
            yield problem(config, key, f"there is no such folder (looked in {Path.cwd()})", example)
        elif (path / "checkpoints").is_dir() and not os.path.lexists(path / "manifest.json"):
            yield problem(config, key, "is a run's folder, and a checkpoint's is needed", example)
        elif key == "ckpt_path" and hf_config.is_folder(path):
            yield problem(config, key, "is a Hugging Face folder", f"init_from={show(value)}")


def _check_source(data: Mixed) -> Iterator[Problem]:
    if isinstance(data, data_schema.FileOrHubData) and data.path:
        path = Path(data.path).expanduser()
        if os.path.lexists(path) and (reason := disk.why_unreadable(path)):
            yield Problem(f"data.path: {reason}", keys=("data.path",))
    if isinstance(data, (FilesData, TokenFilesData)):
        if not data.train_files:
            yield problem(data, "train_files", "nothing to train on", "name a file or a folder", prefix="data.")
        yield from _check_files(data)
        none_held_out = isinstance(data, TokenFilesData) or data.val_fraction == 0
        if not data.val_files and data.val_sequences > 0 and none_held_out:
            remedy = "data.val_sequences=0 for no validation"
            yield problem(data, "val_files", "nothing is held out to validate on", remedy, prefix="data.")
    if isinstance(data, data_schema.TextData) and data.cache_dir is not None:
        yield from disk.check_folder(data.cache_dir, "data.cache_dir")
    try:
        tokenizer_file.number_of_ids(data.tokenizer)
    except UserError as error:
        yield from (one._replace(keys=("data.tokenizer",)) for one in error.problems)


def _check_files(data: FilesData | TokenFilesData) -> list[Problem]:
    problems: list[Problem] = []
    kinds = text_files.OF_TEXT if isinstance(data, FilesData) else text_files.OF_IDS
    for key, patterns in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        text_files.find_all(key, patterns, kinds, problems)
    return problems


_ACROSS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _names,
    kept_layers.check,
    lambda config: data_schema.check_mixture(config.data),
    lambda config: data_schema.check_validation(config.data),
    _shape,
    _vocabulary,
    run_length.check,
    _without_effect,
    lambda config: _check_batch(config, run_length.known_ranks(config)),
    backend_support.check,
    sharding.check,
    lambda config: data_schema.check_borders(config.data) if config.document_mask else iter(()),
    check_logger,
)
