"""What a backend, or a kernel of attention, can be asked for, as far as the settings tell.

`fp8.support` and `fp8/resolve.py` have what only the machine can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set

from gpt2_fp8.config.block_spec import FUSED_OPTIONS, Option, block_spec, why_not
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.kept_layers import Kept, every_block, kept, partly, split_mlp
from gpt2_fp8.config.model_checks import in_any_shape
from gpt2_fp8.config.schema import AttentionKernel, FP8PrecisionConfig, ModelConfig, RunConfig

FP8_CAPABILITY = (8, 9)  # GPUs with FP8 matrix units, by compute capability: Ada and later
ROWWISE_CAPABILITY = (9, 0)  # and those that multiply with a scale a row
HOPPER = 9
FUSED_RECIPES = ("delayed", "auto")
ON_A_GPU: tuple[AttentionKernel, ...] = ("cudnn", "flash", "te")
_OF_PRECISION = "precision.name", "recipe", "precision.keep_bf16", "precision.backward"
_OF_LAYERS = "precision.backend", "model.dropout", "document_mask", "penalty"


def parse_version(capability: str | None) -> tuple[int, int] | None:
    """Return a compute capability such as "9.0" as numbers; None if it is unknown, or another kind of text."""
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", capability or "", re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def why_not_fused(config: RunConfig) -> str | None:
    """Return why a run in FP8 cannot use the fused layers, whatever the GPU; None if it can."""
    if config.recipe.name not in FUSED_RECIPES:
        return f"they do delayed scaling alone, not recipe={config.recipe.name}"
    if config.model.dropout:
        return f"they have no dropout, and model.dropout={config.model.dropout:g}"
    if config.document_mask:
        return "their attention has no mask, and this is document_mask=true"
    if names := [name for name in ("logit_l2", "activation_l1") if getattr(config.penalty, name)]:
        given = " and ".join(f"penalty.{name}={getattr(config.penalty, name):g}" for name in names)
        return f"of the penalties they have z_loss alone, and this is {given}"
    if (backward := _backward(config)) != "fp8":
        return f"their backward is in FP8, and this is precision.backward={backward}"
    if block := partly(_kept(config)):
        return f"they keep whole blocks in bf16, and precision.keep_bf16 names a part of {block}"
    return _lacking(config.model, FUSED_OPTIONS | {Option.DROPOUT})


def splits_mlp(config: RunConfig) -> bool:
    """Return whether Transformer Engine's own MLP, which is one module, cannot do what is asked of it."""
    return _backward(config) == "bf16" or split_mlp(_kept(config)) is not None


def _backward(config: RunConfig) -> str:
    return config.precision.backward if isinstance(config.precision, FP8PrecisionConfig) else "fp8"


def _kept(config: RunConfig) -> Kept:
    precision = config.precision
    names = precision.keep_bf16 if isinstance(precision, FP8PrecisionConfig) else []
    return kept(names, config.model.n_layer)


def _lacking(model: ModelConfig, offers: Set[Option]) -> str | None:
    """Name the options of a model that layers with `offers` lack; None if there are none. Its shape need not fit."""
    return why_not(block_spec(in_any_shape(model)), "they", offers)


def _only_fp8(config: RunConfig) -> str | None:
    if config.precision.name in ("fp32", "bf16"):
        return f"its kernels are for FP8, and this is precision={config.precision.name}"
    return why_not_fused(config)


def why_not_te(config: RunConfig) -> str | None:
    """Return why a run cannot have Transformer Engine's layers, whatever the GPU; None if it can."""
    if config.precision.name == "fp32":
        return "it is for FP8 and bf16 here, and this is precision=fp32"
    if config.recipe.name == "rowwise":
        return "it has no scale a row, and this is recipe=rowwise (recipe=current has one a tensor)"
    if (backward := _backward(config)) == "bf16_wgrad":
        return "it has both products of a backward in FP8 or none, and this is precision.backward=bf16_wgrad"
    if backward == "bf16" and config.recipe.name == "registered":
        return "a registered recipe says itself what its backward is in, and this is precision.backward=bf16"
    if backward == "bf16" and config.recipe.name == "delayed":
        return "its delayed scaling has no backward in bf16 (recipe=current or block has one)"
    return None


def why_not_torchao(config: RunConfig) -> str | None:
    """Return why a run cannot have torchao's layers, whatever the machine; None if it can."""
    if config.precision.name in ("fp32", "bf16"):
        return f"it is for FP8, and this is precision={config.precision.name}"
    if config.recipe.name in ("delayed", "block", "mxfp8", "registered"):
        return f"it has the recipes current (tensorwise) and rowwise, not recipe={config.recipe.name}"
    return None


def _no_fp8(config: RunConfig) -> str | None:
    return "plain torch has no FP8 GEMMs" if config.precision.name.startswith("fp8") else None


def why_not_emulated(config: RunConfig) -> str | None:
    """Return why a run cannot have the emulated layers; None if it can."""
    if config.precision.name in ("fp32", "bf16"):
        return f"it emulates FP8, and this is precision={config.precision.name}"
    if config.recipe.name in ("mxfp8", "rowwise", "registered"):
        return f"it has the recipes delayed, current and block, not recipe={config.recipe.name}"
    return None


WHY_NOT: dict[str, Callable[[RunConfig], str | None]] = {
    "fused": _only_fp8,
    "te": why_not_te,
    "torchao": why_not_torchao,
    "reference": _no_fp8,
    "emulated": why_not_emulated,
}


def why_not_asked(config: RunConfig) -> str | None:
    """Return why no machine can compute a run with the backend that it asks for; None if one may.

    Of `auto` in FP8 it is Transformer Engine's reason; the emulated layers are taken only if they are asked for.
    """
    if config.precision.backend != "auto":
        return WHY_NOT[config.precision.backend](config)
    if not isinstance(config.precision, FP8PrecisionConfig):
        return None
    return why_not_fused(config) and why_not_torchao(config) and why_not_te(config)


def check(config: RunConfig) -> Iterator[Finding]:
    """Find requests for a backend, a kernel of attention, or options of them, that no machine can fulfil."""
    name = config.precision.backend
    if reason := why_not_asked(config):
        cause = f"precision.backend={name} cannot run: {reason}"
        if name == "auto":
            cause = f"no backend can do this in FP8 on a GPU: Transformer Engine: {reason}"
        keys = _OF_PRECISION if name == "auto" else (*_OF_PRECISION, *_OF_LAYERS)
        yield Finding(keys, Problem(cause))
    precision = config.precision
    fast = isinstance(precision, FP8PrecisionConfig) and precision.fast_accumulation
    if fast and (reason := _only_fused(config, "that choice") or _why_no_sums(config)):
        yield Finding.of("precision.fast_accumulation", f"precision.fast_accumulation=true: {reason}")
    if config.compile_mode != "default" and (reason := why_not_recorded(config)):
        yield Finding.of("compile_mode", f"compile_mode={config.compile_mode}: {reason}")
    if config.cuda_graphs is True and (reason := _only_fused(config, "graphs")):
        yield Finding.of("cuda_graphs", f"cuda_graphs=true: {reason}")
    if found := _why_no_attention(config):
        key, reason = found
        yield Finding(("attention", key), Problem(f"attention={config.attention}: {reason}"))


def _only_fused(config: RunConfig, what: str) -> str | None:
    """Return why a run cannot have `what` of the fused layers; None if it can."""
    if not isinstance(config.precision, FP8PrecisionConfig):
        return f"only the fused FP8 layers have {what}, and this is precision={config.precision.name}"
    if config.precision.backend not in ("auto", "fused"):
        return f"only the fused FP8 layers have {what}, and this is precision.backend={config.precision.backend}"
    if reason := why_not_fused(config):
        return f"only the fused FP8 layers have {what}; {reason}"
    return None


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


def has_plain_layers(config: RunConfig) -> bool:
    """Return whether a run is sure to have plain-torch layers, or FP8 layers that are made of them."""
    if config.precision.name in ("fp32", "bf16"):
        return config.precision.backend in ("auto", "reference")
    return config.precision.backend in ("torchao", "emulated")


def _why_no_attention(config: RunConfig) -> tuple[str, str] | None:
    """Return the other key and the reason why no machine can take a kernel; None if nothing speaks against it."""
    kernel, precision = config.attention, config.precision
    if kernel not in ON_A_GPU:
        return None
    if config.document_mask:
        return "document_mask", "it takes no mask, and this is document_mask=true"
    if config.trainer.accelerator == "cpu":
        return "trainer.accelerator", "its kernels are a GPU's, and this is trainer.accelerator=cpu"
    if precision.name == "fp32":
        return "precision", "its kernels take bfloat16, and this is precision=fp32"
    if kernel == "te" and has_plain_layers(config):
        return "precision.backend", "only the FP8 layers and precision.backend=te have it"
    if kernel == "cudnn" and config.trainer.deterministic:
        return "trainer.deterministic", "torch's cuDNN kernel is not deterministic"
    return None
