"""A run's configuration as plain values in its checkpoints, and back."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from gpt2_fp8.checkpoint.load import read_plain
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.config import parsing, tokenizer_file
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import hints_of, kind_of, tag_field, tags_of, value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.model.flops import parameter_count
from gpt2_fp8.model.gpt2 import padded_vocabulary

log = logging.getLogger(__name__)

KEY = "hyper_parameters"  # Lightning's name for a module's hyper-parameters in a checkpoint
_REMEDY = (
    "continue it for a step with ckpt_path; or in Python give it, as it was trained: "
    "GPT2Module.load_from_checkpoint(FOLDER, config=load_config(...))"
)


def to_plain(config: RunConfig, vocab_size: int | None = None) -> dict[str, Any]:
    """Return a configuration as nested dicts and lists of plain values.

    A tokenizer's file may be gone when they are read, so `vocab_size` then stands in for its number of ids.
    """
    plain = asdict(config)
    if config.data.tokenizer not in tokenizer_file.NAMES and config.model.vocab_size is None:
        plain["model"]["vocab_size"] = vocab_size
    return plain


def from_checkpoint(checkpoint: dict[str, Any], path: Path) -> RunConfig:
    """Return the configuration that the checkpoint `path` was trained with, without the weights it began from.

    Raises CheckpointError, with every problem, if it holds none, or one of another version.
    """
    if KEY not in checkpoint:
        raise CheckpointError([Problem(f"{path} does not hold the configuration that it was trained with", _REMEDY)])
    config, found = parsing.build(RunConfig, _upgraded(checkpoint[KEY], path))
    if config is None:
        causes = [f"{path} holds a configuration that cannot be read: {problem.cause}" for problem in found]
        raise CheckpointError([Problem(cause, _REMEDY) for cause in causes])
    return replace(config, init_from=None, ckpt_path=None)


def _upgraded(plain: Any, path: Path) -> Any:
    """Return the configuration of a checkpoint, which may be a stranger's, with the keys that its groups have now."""
    if not isinstance(plain, dict):
        return plain
    if value_of(plain, "precision.name") == "auto":  # there once was this choice
        plain = plain | {"precision": _as_ran(plain["precision"], value_of(read_plain(path, "precision"), "ran"))}
    full = with_defaults(RunConfig, plain)
    if isinstance(precision := full.get("precision"), dict) and "emulate" in precision:  # there once was this key
        full["precision"] = {key: value for key, value in precision.items() if key != "emulate"}
        if precision["emulate"] is not None:
            log.info("the checkpoint's precision.emulate is dropped: there is no such key any more")
    if full["optimizer"] == {"name": "adamw8bit"}:  # its state is not read, and its weights are as any
        full["optimizer"] = {"name": "adamw_bf16"}
    return full


def _as_ran(auto: Mapping[str, Any], ran: object) -> dict[str, Any]:
    """Return the precision that `ran` where `precision=auto` was asked for."""
    fp8 = {key: value for key, value in auto.items() if key != "tolerance"}
    fp8 |= {"fast_accumulation": False, "fallback": "allow"}
    return (fp8 if str(ran).startswith("fp8") else {}) | {"name": ran, "backend": "auto"}


def with_defaults(cls: type[Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a group, with the defaults of keys that it, or a group in it, was saved without."""
    full: dict[str, Any] = {}
    for key in fields(cls):
        if key.default is not MISSING:
            full[key.name] = key.default
        elif key.default_factory is not MISSING:
            value: Any = key.default_factory()
            full[key.name] = asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
    full |= plain
    hints = hints_of(cast("Hashable", cls))
    for name, value in full.items():
        if isinstance(value, dict) and (group := _class_of(hints.get(name), value)) is not None:
            full[name] = with_defaults(group, value)
    return full


def _class_of(hint: Any, group: Mapping[str, Any]) -> type[Any] | None:
    """Return the dataclass of a group's plain values, among those of a union by its tag; None if there is none."""
    classes: tuple[Any, ...] = kind_of(hint).classes if hint is not None else ()
    if len(classes) < 2:
        return classes[0] if classes else None
    tag = tag_field(classes)
    return next((each for each in classes if group.get(tag) in tags_of(each, tag)), None)


def check_size(config: RunConfig, weights: dict[str, Tensor], path: Path) -> None:
    """Raise CheckpointError if the number of weights is not that of the configuration's model.

    Call it before the model is built: a stranger's configuration may name one of any size.
    """
    wanted = parameter_count(config.model, padded_vocabulary(vocabulary(config)))
    held = sum(weight.numel() for weight in weights.values())
    if wanted != held:
        cause = f"{path} holds {held:,} parameters, and the model of its configuration has {wanted:,}"
        raise CheckpointError([Problem(cause, _REMEDY)])
