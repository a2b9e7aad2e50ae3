"""What to type so that the fused layers can compute a run that asks for them: the nearest settings that they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from gpt2_fp8.config import backend_support
from gpt2_fp8.config.kept_layers import kept, partly, typed
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.model_checks import FP8_MULTIPLE
from gpt2_fp8.config.precision_schema import DelayedRecipe, FP8PrecisionConfig
from gpt2_fp8.config.schema import ModelConfig, RunConfig

_SHAPE = 2  # words about the model's shape that are still a nearby one
_OF_ROPE = [key.name for key in fields(ModelConfig) if key.name.startswith("rope_")]
_OF_BLOCK = ("qk_norm", "norm", "mlp", "positions", "tied_head")  # their defaults are GPT-2's
_DELAYED = DelayedRecipe(name="delayed", margin=0, amax_history_len=16, amax_compute_algo="max")


class Change(NamedTuple):
    """A word, and the values that it sets: of the group `precision`, of the run, and of the group `model`."""

    typed: str
    precision: dict[str, Any]
    run: dict[str, Any]
    model: Mapping[str, Any] = MappingProxyType({})


def block(config: RunConfig) -> list[Change]:
    """Return the words that make the model's block GPT-2's, as one change, if it is not far from it."""
    model = config.model
    odd = model.n_embd % model.n_head or model.n_embd % FP8_MULTIPLE  # another problem, with a remedy of its own
    if odd or any(getattr(model, key) is not None for key in _OF_ROPE):
        return []
    plain = {"n_kv_head": model.n_head, "head_size": model.n_embd // model.n_head, "dropout": 0.0}
    plain |= {key: getattr(ModelConfig, key) for key in _OF_BLOCK}
    changed = {key: value for key, value in plain.items() if getattr(model, key) not in (None, value)}
    words = " ".join(f"model.{key}={show(value)}" for key, value in changed.items())
    return [Change(words, {}, {}, changed)] if 0 < len(changed) <= _SHAPE else []


def others(config: RunConfig) -> list[Change]:
    """Return the words for what else they do not have: a recipe, a mask, penalties, a part of a block in bf16."""
    found = []
    if config.recipe.name not in backend_support.FUSED_RECIPES:
        found.append(Change("recipe=delayed", {}, {"recipe": _DELAYED}))
    if config.document_mask:
        found.append(Change("document_mask=false", {}, {"document_mask": False}))
    if given := backend_support.penalties_not_fused(config):
        penalty = replace(config.penalty, **dict.fromkeys(given, 0.0))
        found.append(Change(" ".join(f"penalty.{name}=0" for name in given), {}, {"penalty": penalty}))
    return found + _whole_blocks(config)


def _whole_blocks(config: RunConfig) -> list[Change]:
    """Return the word that keeps the whole of each block of which a part is kept, if the others stay in FP8."""
    if not isinstance(config.precision, FP8PrecisionConfig):
        return []
    layers = kept(config.precision.keep_bf16, config.model.n_layer)
    whole = [i for i, parts in enumerate(layers.blocks) if parts]
    if partly(layers) is None or len(whole) == len(layers.blocks):
        return []
    names = [f"blocks.{i}" for i in whole] + ["head"] * layers.head
    return [Change(typed(names), {"keep_bf16": names}, {})]
