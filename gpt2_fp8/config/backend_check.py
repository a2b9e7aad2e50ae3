"""What is wrong with the backend that a run asks for, and the nearest settings that work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from gpt2_fp8.config import attention_support, backend_support, bf16_instead, fused_nearby
from gpt2_fp8.config.backend_support import why_not_asked
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.fused_nearby import Change
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig, StatelessRecipe
from gpt2_fp8.config.schema import RunConfig

_OF_PRECISION = "precision.name", "recipe", "precision.keep_bf16", "precision.backward"
_OF_LAYERS = "precision.backend", "model.dropout", "document_mask", "penalty"
_MOST = 3  # ways out that are named
_BY_TORCHAO = 'precision.backend=torchao (pip install -e ".[torchao]")'

_AUTO = Change("precision.backend=auto", {"backend": "auto"}, {})
_EMULATED = Change("precision.backend=emulated, which is slow", {"backend": "emulated"}, {})
_IN_FP8 = Change("precision.backward=fp8", {"backward": "fp8"}, {})
_CURRENT = Change("recipe=current", {}, {"recipe": StatelessRecipe(name="current")})
_ROWWISE = Change("recipe=rowwise", {}, {"recipe": StatelessRecipe(name="rowwise")})
_NO_GRAPHS = Change("cuda_graphs=auto", {}, {"cuda_graphs": "auto"})
_ANY_ATTENTION = Change("attention=auto", {}, {"attention": "auto"})


def check(config: RunConfig) -> Iterator[Finding]:
    """Find requests for a backend, or for options of one, that no machine can fulfil."""
    name = config.precision.backend
    if reason := why_not_asked(config):
        cause = f"precision.backend={name} cannot run: {reason}"
        if name == "auto":
            cause = f"no backend can do this in FP8 on a GPU: Transformer Engine: {reason}"
        keys = _OF_PRECISION if name == "auto" else (*_OF_PRECISION, *_OF_LAYERS)
        yield Finding(keys, Problem(cause, _remedy(config)))
    yield from backend_support.options(config)


def _remedy(config: RunConfig) -> str:
    """Name the nearest settings that are accepted: one word to change, or several; the slow one last."""
    found: list[tuple[Change, ...]] = []
    changes = _changes(config)
    for words in (words for size in range(1, len(changes) + 1) for words in combinations(changes, size)):
        if not any(set(map(id, other)) <= set(map(id, words)) for other in found) and _accepts(config, words):
            found.append(words)
    ways = [words for words in found if _EMULATED not in words][:_MOST] or found
    ways += [words for words in found if words == (_EMULATED,)][: _MOST - len(ways)]
    named = [_typed(config, words) for words in ways]
    if config.precision.backend == "reference" and (in_bf16 := bf16_instead.words(config)):
        named.insert(1, in_bf16)
    return ", or ".join(named[:_MOST])


def _changes(config: RunConfig) -> list[Change]:
    """Return what may help, the nearest first."""
    name = config.precision.backend
    backends = [] if name == "auto" else [_AUTO, *(fused_nearby.block(config) if name == "fused" else [])]
    backends += fused_nearby.others(config) if name == "fused" else []
    recipes = [_CURRENT, _ROWWISE, *backends] if name == "torchao" else [*backends, _CURRENT]
    kernels = [_NO_GRAPHS] if config.cuda_graphs is True else []
    kernels += [_ANY_ATTENTION] if config.attention in attention_support.ON_A_GPU else []
    if not isinstance(config.precision, FP8PrecisionConfig):
        return [*backends, *kernels]
    return [*recipes, _IN_FP8, *kernels, _EMULATED]


def _changed(config: RunConfig, words: tuple[Change, ...]) -> RunConfig:
    """Return the settings after these words. If only torchao is left of `auto`, its layers are asked for."""
    for word in words:
        model = replace(config.model, **word.model)
        config = replace(config, precision=replace(config.precision, **word.precision), model=model, **word.run)
    if not isinstance(config.precision, FP8PrecisionConfig) or _AUTO not in words:
        return config
    alone = backend_support.why_not_fused(config) and backend_support.why_not_te(config)
    return replace(config, precision=replace(config.precision, backend="torchao")) if alone else config


def _accepts(config: RunConfig, words: tuple[Change, ...]) -> bool:
    """Return whether changed settings have a backend, and no problem with it that they had not before."""
    keys = [key for word in words for key in (*word.precision, *word.run, *word.model)]
    if len(set(keys)) < len(keys):
        return False
    changed = _changed(config, words)
    return why_not_asked(changed) is None and _refused(changed) <= _refused(config)


def _refused(config: RunConfig) -> set[tuple[str, ...]]:
    """Return the keys that do not fit each other, beside the backend."""
    return {found.keys for found in (*backend_support.options(config), *attention_support.check(config))}


def _typed(config: RunConfig, words: tuple[Change, ...]) -> str:
    """Return what is typed. If only torchao can compute it, its layers are named, since they may not be installed."""
    by_torchao = _changed(config, words).precision.backend == "torchao"
    return " ".join(_BY_TORCHAO if word is _AUTO and by_torchao else word.typed for word in words)
