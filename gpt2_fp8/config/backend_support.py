"""What a backend can be asked for, as far as the settings tell.

`precision.support` has what only the machine can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from gpt2_fp8.config.block_spec import FUSED_OPTIONS, Option, block_spec, why_not
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.kept_layers import Kept, every_block, kept, partly, split_mlp
from gpt2_fp8.config.model_checks import in_any_shape
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.config.schema import ModelConfig, RunConfig

FUSED_RECIPES = ("delayed", "auto")
_OF_PRECISION = "precision.name", "recipe", "precision.keep_bf16", "precision.backward"
_OF_LAYERS = "precision.backend", "model.dropout", "document_mask", "penalty"


def why_not_fused(config: RunConfig) -> str | None:
    """Return why a run in FP8 cannot use the fused layers, whatever the GPU; None if it can."""
    if config.recipe.name not in FUSED_RECIPES:
        return f"they do delayed scaling alone, not recipe={config.recipe.name}"
    if config.model.dropout:
        return f"they have no dropout, and model.dropout={config.model.dropout:g}"
    if config.document_mask:
        return "their attention has no mask, and this is document_mask=true"
    if names := penalties_not_fused(config):
        given = " and ".join(f"penalty.{name}={getattr(config.penalty, name):g}" for name in names)
        return f"of the penalties they have z_loss alone, and this is {given}"
    if (backward := _backward(config)) != "fp8":
        return f"their backward is in FP8, and this is precision.backward={backward}"
    if block := partly(_kept(config)):
        return f"they keep whole blocks in bf16, and precision.keep_bf16 names a part of {block}"
    return _lacking(config.model, FUSED_OPTIONS | {Option.DROPOUT})


def penalties_not_fused(config: RunConfig) -> list[str]:
    """Return the keys of the run's penalties that the fused layers do not have."""
    return [name for name in ("logit_l2", "activation_l1") if getattr(config.penalty, name)]


def splits_mlp(config: RunConfig) -> bool:
    """Return whether Transformer Engine's own MLP, which is one module, cannot do what is asked of it."""
    return _backward(config) == "bf16" or split_mlp(_kept(config)) is not None


def _backward(config: RunConfig) -> str:
    return config.precision.backward if isinstance(config.precision, FP8PrecisionConfig) else "fp8"


def _kept(config: RunConfig) -> Kept:
    precision = config.precision
    names = precision.keep_bf16 if isinstance(precision, FP8PrecisionConfig) else []
    return kept(names, config.model.n_layer)


def why_not_te(config: RunConfig) -> str | None:
    """Return why a run cannot have Transformer Engine's layers, whatever the GPU; None if it can."""
    if config.precision.name == "fp32":
        return "it is for FP8 and bf16 here, and this is precision=fp32"
    if config.recipe.name == "rowwise":
        return "it has no scale a row, and this is recipe=rowwise (recipe=current has one a tensor)"
    if (backward := _backward(config)) == "bf16_wgrad":
        return "it has both products of a backward in FP8 or none, and this is precision.backward=bf16_wgrad"
    if backward == "bf16" and config.recipe.name == "delayed":
        return "its delayed scaling has no backward in bf16 (recipe=current or block has one)"
    return None


def why_not_torchao(config: RunConfig) -> str | None:
    """Return why a run cannot have torchao's layers, whatever the machine; None if it can."""
    if config.precision.name in ("fp32", "bf16"):
        return f"it is for FP8, and this is precision={config.precision.name}"
    if config.recipe.name in ("delayed", "block", "mxfp8"):
        return f"it has the recipes current (tensorwise) and rowwise, not recipe={config.recipe.name}"
    return None


def _lacking(model: ModelConfig, offers: Set[Option]) -> str | None:
    """Name the options of a model that layers with `offers` lack; None if there are none. Its shape need not fit."""
    return why_not(block_spec(in_any_shape(model)), "they", offers)


def _only_fp8(config: RunConfig) -> str | None:
    if config.precision.name in ("fp32", "bf16"):
        return f"its kernels are for FP8, and this is precision={config.precision.name}"
    return why_not_fused(config)


def _no_fp8(config: RunConfig) -> str | None:
    return "plain torch has no FP8 GEMMs" if config.precision.name.startswith("fp8") else None


def why_not_emulated(config: RunConfig) -> str | None:
    """Return why a run cannot have the emulated layers; None if it can."""
    if config.precision.name in ("fp32", "bf16"):
        return f"it emulates FP8, and this is precision={config.precision.name}"
    if config.recipe.name in ("mxfp8", "rowwise"):
        return f"it has the recipes delayed, current and block, not recipe={config.recipe.name}"
    return None


WHY_NOT: dict[str, Callable[[RunConfig], str | None]] = {
    "fused": _only_fp8,
    "te": why_not_te,
    "torchao": why_not_torchao,
    "reference": _no_fp8,
    "emulated": why_not_emulated,
}


def _why_none(config: RunConfig) -> str | None:
    """Return why no layers but the emulated can compute a run in FP8: Transformer Engine's reason."""
    if not isinstance(config.precision, FP8PrecisionConfig):
        return None
    return why_not_fused(config) and why_not_torchao(config) and why_not_te(config)


def why_not_asked(config: RunConfig) -> str | None:
    """Return why no machine can compute a run with the backend that it asks for; None if one may."""
    name = config.precision.backend
    return _why_none(config) if name == "auto" else WHY_NOT[name](config)


def check(config: RunConfig) -> Iterator[Finding]:
    """Find requests for a backend, or for options of one, that no machine can fulfil."""
    name = config.precision.backend
    if reason := why_not_asked(config):
        cause = f"precision.backend={name} cannot run: {reason}"
        if name == "auto":
            cause = f"no backend can do this in FP8 on a GPU: Transformer Engine: {reason}"
        keys = _OF_PRECISION if name == "auto" else (*_OF_PRECISION, *_OF_LAYERS)
        yield Finding(keys, Problem(cause))
    yield from options(config)


def options(config: RunConfig) -> Iterator[Finding]:
    """Find options that the layers of a run do not have, whichever layers these are."""
    precision = config.precision
    fast = isinstance(precision, FP8PrecisionConfig) and precision.fast_accumulation
    if fast and (reason := _only_fused(config, "that choice") or _why_no_sums(config)):
        remedy = "leave precision.fast_accumulation out"
        problem = Problem(f"precision.fast_accumulation=true: {reason}", remedy)
        yield Finding(("precision.fast_accumulation",), problem)
    if config.compile_mode != "default" and (reason := why_not_recorded(config)):
        problem = Problem(f"compile_mode={config.compile_mode}: {reason}", "compile_mode=default")
        yield Finding(("compile_mode",), problem)
    if config.cuda_graphs is True and (reason := _why_no_graphs(config)):
        problem = Problem(f"cuda_graphs=true: {reason}", "cuda_graphs=auto takes them where they help")
        yield Finding(("cuda_graphs",), problem)


def _why_no_sums(config: RunConfig) -> str | None:
    """Return why there is no sum that `fast_accumulation` could change; None if there is one."""
    reason = "it is for the blocks, and precision.keep_bf16 keeps each of them in bf16"
    return reason if every_block(_kept(config)) else None


def why_not_recorded(config: RunConfig) -> str | None:
    """Return why torch.compile cannot record a run's micro-batches, whatever the GPU; None if it can."""
    if config.precision.name not in ("fp32", "bf16"):
        return f"it records the plain-torch layers of bf16 and fp32, and this is precision={config.precision.name}"
    if config.precision.backend not in ("auto", "reference"):
        return f"it records the plain-torch layers, and this is precision.backend={config.precision.backend}"
    if config.trainer.accelerator == "cpu":
        return "CUDA graphs are a GPU's, and this is trainer.accelerator=cpu"
    if config.compile is False:
        return "it is a mode of torch.compile, and this is compile=false"
    if config.model.dropout:
        reason = "what a graph draws is not known to be what an uninterrupted run draws"
        return f"{reason}, and this is model.dropout={config.model.dropout:g}"
    return None


def _only_fused(config: RunConfig, what: str) -> str | None:
    """Return why a run in FP8 cannot have `what` of the fused layers; None if it can."""
    assert isinstance(config.precision, FP8PrecisionConfig)
    if config.precision.backend not in ("auto", "fused"):
        return f"only the fused FP8 layers have {what}, and this is precision.backend={config.precision.backend}"
    if reason := why_not_fused(config):
        return f"only the fused FP8 layers have {what}; {reason}"
    return None


def _why_no_graphs(config: RunConfig) -> str | None:
    if not isinstance(config.precision, FP8PrecisionConfig):
        return f"only the fused FP8 layers have graphs, and this is precision={config.precision.name}"
    return _only_fused(config, "graphs")
