"""A trained model from its folder: the checkpoint, the configuration that it holds as plain values, its weights."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.files import read_plain
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.config import parsing, tokenizer_file
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import hints_of, kind_of, show, tag_field, tags_of, value_of
from gpt2_fp8.config.programs import EXAMPLES, Averaged, Which, is_run
from gpt2_fp8.config.schema import FREE_OF_WEIGHTS, ModelConfig, RunConfig
from gpt2_fp8.data.tokenizer import Tokenizer, fingerprint, load_tokenizer

log = logging.getLogger(__name__)

KEY = "hyper_parameters"  # Lightning's name for a module's hyper-parameters in a checkpoint
TEXT = "TokenDataModule"  # of the DataModule: which text it was trained on, and how far


class Trained(NamedTuple):
    """What a checkpoint holds of a model."""

    path: Path
    config: RunConfig
    weights: Mapping[str, Tensor]  # float32, by our names
    of: Literal["raw", "ema"]  # the weights of its step, or their average
    step: Mapping[str, Any]  # what a training step begins with beside them, such as FP8 scales; without an average
    parts: Mapping[str, Any]  # what else was asked for, and `KEY`


def load(ckpt_path: str, which: Which, weights: Averaged = "auto") -> Trained:
    """Return the model that these words of a program's command line mean, with remedies for that."""
    try:
        return read(find_checkpoint(Path(ckpt_path).expanduser(), which), TEXT, weights=weights)
    except CheckpointError as error:  # its own remedies are for a run, or for Python
        remedy = f"name another one: {EXAMPLES}"
        raise CheckpointError([Problem(problem.cause, remedy) for problem in error.problems]) from None


def find_checkpoint(source: Path, which: Which = "last") -> Path:
    """Return the checkpoint that `source` means: it is one, or a run's folder with its newest whole one or its best."""
    if not is_run(source):
        return source
    found = pointers.resolve(which, source / "checkpoints")
    if found is None:
        raise UserError.of(f"{source} has no checkpoint yet", "name a run that has saved one")
    return found


def read(
    path: Path, *parts: str, map_location: torch.device | str = "cpu", config: RunConfig | None = None,
    weights: Averaged = "auto",
) -> Trained:  # fmt: skip
    """Read a checkpoint's folder, and these parts of it too. `config` is for one that does not hold its own.

    `weights`: those of its step, or their average; auto: the average if it holds one. Raises UserError without it.
    """
    checkpoint = files.read(path, map_location, ("state_dict", "training_step", KEY, *parts))
    config = config or from_checkpoint(checkpoint, path)
    rest = {key: checkpoint[key] for key in (KEY, *parts) if key in checkpoint}
    step, average = split_average(checkpoint.get("training_step", {}))
    if weights == "ema" and average is None:
        raise UserError.of(f"weights=ema: {path} holds no average of weights")
    if average is None or weights == "raw":
        return Trained(path, config, checkpoint["state_dict"], "raw", step, rest)
    return Trained(path, config, average, "ema", step, rest)


def tokenizer_of(found: Trained, name: str, remedy: str) -> Tokenizer:
    """Return the tokenizer `name`. Raises UserError if it is gone, or its content is not that of training."""
    try:
        ids, has = tokenizer_file.number_of_ids(name), vocabulary(found.config)
        if ids > has:
            raise UserError.of(f"data.tokenizer={show(name)} has {ids:,} ids, and the model {has:,}")
        tokenizer = load_tokenizer(name)
        now = fingerprint(tokenizer)
        if found.parts.get(TEXT, {}).get("fingerprint", {}).get("tokenizer", now) != now:
            raise UserError.of(f"data.tokenizer={show(name)}: its content is not what the run was trained with")
    except UserError as error:  # the others' remedies are for a run
        raise UserError.of(error.problems[0].cause, remedy) from None
    return tokenizer


def split_average(step: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split what a checkpoint has of a training step into that without the average of weights, and the average."""
    return {key: value for key, value in step.items() if key != "average"}, step.get("average")


def to_plain(config: RunConfig, vocab_size: int | None = None) -> dict[str, Any]:
    """Return a configuration as nested dicts and lists of plain values.

    A tokenizer's file may be gone when they are read, so `vocab_size` then stands in for its number of ids.
    """
    plain = asdict(config)
    if config.data.tokenizer not in tokenizer_file.NAMES and config.model.vocab_size is None:
        plain["model"]["vocab_size"] = vocab_size
    return plain


def from_checkpoint(checkpoint: dict[str, Any], path: Path) -> RunConfig:
    """Return the configuration that the checkpoint `path` was trained with, without the weights it began from."""
    if KEY not in checkpoint:
        raise CheckpointError.of(
            f"{path} does not hold the configuration that it was trained with",
            "continue it for a step; or GPT2Module.load_from_checkpoint(FOLDER, config=load_config(...))",
        )
    config, found = parsing.build(RunConfig, _upgrade(checkpoint[KEY], path))
    if config is None:
        cause = f"{path} holds a configuration that is not valid"
        raise CheckpointError([Problem(f"{cause}: {problem.cause}") for problem in found])
    return replace(config, init_from=None, ckpt_path=None)


def _upgrade(plain: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint of any version with the keys and values that there are now."""
    if value_of(plain, "precision.name") == "auto":
        ran = value_of(read_plain(path, "precision"), "ran")
        fp8 = {"fast_accumulation": False, "fallback": "allow"} | plain["precision"]
        plain = plain | {"precision": (fp8 if str(ran).startswith("fp8") else {}) | {"name": ran, "backend": "auto"}}
    full = with_defaults(RunConfig, plain)
    if full["optimizer"] == {"name": "adamw8bit"}:  # its state is not read, and its weights are as any
        full["optimizer"] = {"name": "adamw_bf16"}
    return full


def with_defaults(cls: type[Any], plain: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the plain values of a group as its keys are now; so in the groups within it.

    A key that it was saved without has its default, and one that there is no more is left out.
    """
    full: dict[str, Any] = {}
    for key in fields(cls):
        if key.default is not MISSING:
            full[key.name] = key.default
        elif key.default_factory is not MISSING:
            value: Any = key.default_factory()
            full[key.name] = asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
    known = {key.name for key in fields(cls)}
    for name in plain.keys() - known:
        log.info("the checkpoint's %s%s is dropped: there is no such key any more", above, name)
    full |= {name: value for name, value in plain.items() if name in known}
    hints = hints_of(cast("Hashable", cls))
    for name, value in full.items():
        if not isinstance(value, dict):
            continue
        if (group := _class_of(hints.get(name), value)) is not None:
            full[name] = with_defaults(group, value, f"{above}{name}.")
        for own, below in value.items():  # a mixture's sources
            if (group := _class_of(kind_of(hints[name]).values, below)) is not None:
                value[own] = with_defaults(group, below, f"{above}{name}.{own}.")
    return full


def _class_of(hint: Any, group: Mapping[str, Any]) -> type[Any] | None:
    """Return the dataclass of a group's plain values, among those of a union by its tag; None if there is none."""
    classes: tuple[Any, ...] = kind_of(hint).classes if hint is not None else ()
    if len(classes) < 2:
        return classes[0] if classes else None
    tag = tag_field(classes)
    return next((each for each in classes if group.get(tag) in tags_of(each, tag)), None)


def other_settings(model: ModelConfig, given: dict[str, Any]) -> Iterator[Problem]:
    """Yield the differences between a checkpoint's architecture, `given`, and this one: equal shapes say little.

    A checkpoint of format 1 gives nothing. One from before the model had options has GPT-2's.
    """
    given = with_defaults(ModelConfig, given, "model.") if given else {}
    own = {key: value for key, value in asdict(model).items() if key not in FREE_OF_WEIGHTS}
    if others := [key for key in own if key in given and given[key] != own[key]]:
        told = "; ".join(f"model.{key} is {show(given[key])} there, {show(own[key])} here" for key in others)
        cause = f"the checkpoint is of another model: {told}"
        yield Problem(cause, "use the model= that the checkpoint was trained with")


def check_weights(path: Path, model: ModelConfig) -> None:
    """Raise CheckpointError if the checkpoint `path` is of another model, for a run that takes its weights alone.

    Vocabulary and learned positions show in the shapes. Where the context becomes longer, rotations may change with it.
    """
    given = read_plain(path, "model") or value_of(read_plain(path, KEY), "model")
    if not isinstance(given, dict):  # format 1
        return
    there = ModelConfig(**with_defaults(ModelConfig, given, "model."))
    free, longer = (*FREE_OF_WEIGHTS, "vocab_size", "n_positions"), model.n_positions > there.n_positions
    own = {k: value for k, value in asdict(model).items() if k in free or (longer and k.startswith("rope_"))}
    there = replace(there, **own)
    if (there.n_layer, block_spec(there)) != (model.n_layer, block_spec(model)):  # which knows what a null means
        refuse(list(other_settings(model, asdict(there))))


def refuse(differences: list[Problem]) -> None:
    """Raise CheckpointError with every difference, if there are any."""
    if differences:
        raise CheckpointError(differences)
