"""Whether `init_from` names a Hugging Face folder, and whether `model` is what its `config.json` says.

Every difference is a problem of its own, whose remedy is the word to type. Nothing is allocated before that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_fp8.config import hf_config
from gpt2_fp8.config.block_spec import ROPE_BASE
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.hf_config import Architecture, Keys
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SUPPORTED = ", ".join(architecture.name for architecture in hf_config.ARCHITECTURES)
_LARGEST_BYTES = 1 << 20
_NO_FOLDER = f"give a folder of {SUPPORTED} with {CONFIG} and {WEIGHTS}, or a checkpoint of this program"


def is_folder(path: str | Path) -> bool:
    """Return whether `path` is a Hugging Face folder, and no checkpoint of ours."""
    path = Path(path).expanduser()
    return os.path.isfile(path / CONFIG) and not os.path.lexists(path / "manifest.json")


def read(path: Path) -> tuple[Architecture, Keys]:
    """Return a folder's architecture, and the keys of `model` that it says.

    Raises UserError, with every problem, if it is of no use here.
    """
    text = _json(path)
    architecture = _architecture(path, text)
    try:
        asked, keys = list(hf_config.unknown(text, architecture)), hf_config.from_hf(text, architecture)
    except KeyError as error:
        raise UserError.of(f"init_from={path}: its {CONFIG} has no {error.args[0]}", _NO_FOLDER) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UserError.of(f"init_from={path}: its {CONFIG} cannot be read: {error}", _NO_FOLDER) from None
    remedy = f"give a folder of {architecture.name} without it: no key of model says it"
    problems = [Problem(f"init_from={path}: its {CONFIG} asks for {one}", remedy) for one in asked]
    if not any((path / file).is_file() for file in (WEIGHTS, INDEX)):
        cause = f"init_from={path}: it has no {WEIGHTS}; pickles (pytorch_model.bin) are never opened"
        problems.append(Problem(cause, "save it with save_pretrained of transformers, which writes safetensors"))
    if problems:
        raise UserError(problems)
    return architecture, keys


def check(model: ModelConfig, tokens: int | None, path: Path) -> Iterator[Finding]:
    """Find every difference between `model` and a folder's. `tokens`: the tokenizer's ids, or None if unknown."""
    try:
        _, theirs = read(path)
    except UserError as error:
        yield from (Finding(("init_from",), problem) for problem in error.problems)
        return
    for key, value in theirs.items():
        if key == "vocab_size":
            if (model.vocab_size or tokens or value) != value or (tokens or 0) > value:
                yield _vocabulary(model, tokens or 0, value, path)
        elif not _same(key, own := _own(model, key, theirs), value, theirs):
            cause = f"model.{key}={show(own)}, init_from={path}: its model has {show(value)}"
            yield Finding((f"model.{key}", "init_from"), Problem(cause, f"model.{key}={show(value)}"))


def _architecture(path: Path, text: Keys) -> Architecture:
    """Return the architecture that a `config.json` names. Raises UserError for one that is none of the three."""
    named, kind = text.get("architectures"), text.get("model_type")
    for one in hf_config.ARCHITECTURES:
        if named == [one.name] or (not named and kind == one.model_type):
            return one
    cause = f"init_from={path}: its architectures are {named!a:.100} (model_type {kind!a:.60})"
    raise UserError.of(cause, f"give a folder of {SUPPORTED}")


def _own(model: ModelConfig, key: str, theirs: Keys) -> Any:
    """Return a key's value; if it is null, what follows from the folder's other values."""
    value = getattr(model, key)
    if value is not None:
        return value
    follows = {
        "n_kv_head": theirs["n_head"],
        "head_size": theirs["n_embd"] // theirs["n_head"],
        "mlp_width": 4 * theirs["n_embd"],
        "rope_base": ROPE_BASE if theirs["positions"] == "rope" else None,
    }
    return follows.get(key)


def _same(key: str, own: Any, value: Any, theirs: Keys) -> bool:
    """Compare a key's values. With RoPE, a run may use fewer positions than its model has."""
    if key == "n_positions" and theirs["positions"] == "rope":
        return bool(own <= value)
    if key == "rope_scaling":
        return bool((own or 1) == (value or 1))
    return bool(own == value)


def _vocabulary(model: ModelConfig, tokens: int, value: int, path: Path) -> Finding:
    """Explain that the model, or the tokenizer, has other ids than the folder."""
    cause = f"model.vocab_size={show(model.vocab_size)}, init_from={path}: its model has {value:,} ids"
    cause += f", and the tokenizer {tokens:,}" if tokens else ""
    return Finding(("model.vocab_size", "data.tokenizer", "init_from"), Problem(cause, f"model.vocab_size={value}"))


def _json(path: Path) -> Keys:
    try:
        if (path / CONFIG).stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"it has more than {_LARGEST_BYTES >> 20} MiB")
        text = json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError.of(f"init_from={path}: its {CONFIG} cannot be read: {error}", _NO_FOLDER) from None
    if not isinstance(text, dict):
        raise UserError.of(f"init_from={path}: its {CONFIG} is no object", _NO_FOLDER)
    return text
