"""What a backend, or a kernel of attention, can be asked for, as far as the settings tell.

`fp8.support` and `fp8/resolve.py` have what only the machine can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gpt2_fp8.config.block_spec import FUSED_OPTIONS, Option, block_spec, why_not
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.kept_layers import Kept, every_block, parse_kept, partly, split_mlp
from gpt2_fp8.config.keys import problem
from gpt2_fp8.config.schema import AttentionKernel, FP8PrecisionConfig, RunConfig

FP8_CAPABILITY = (8, 9)  # GPUs with FP8 matrix units, by compute capability: Ada and later
ROWWISE_CAPABILITY = (9, 0)  # and those that multiply with a scale a row
HOPPER = 9
WIDEST_COLUMNS = 4096  # of a row that one block of threads normalises, four columns a thread (`kernels.layer_norm`)
ON_A_GPU: tuple[AttentionKernel, ...] = ("cudnn", "flash", "te")
_OF_PRECISION = ("precision.name", "recipe", "precision.keep_bf16", "precision.backward")
_OF_LAYERS = ("precision.backend", "model.dropout", "document_mask", "penalty")


def parse_version(capability: str | None) -> tuple[int, int] | None:
    """Return a version such as 9.0 as numbers; None if it is unknown, or another kind of text."""
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", capability or "", re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def why_not_fused(config: RunConfig) -> str | None:
    """Return why a run in FP8 cannot use the fused layers, whatever the GPU; None if it can."""
    recipe, dropout, backward, penalty = config.recipe.name, config.model.dropout, _backward(config), config.penalty
    only = f"logit_l2={penalty.logit_l2:g}, penalty.activation_l1={penalty.activation_l1:g}"
    block = partly(_kept(config))
    reason = _first({
        f"they do delayed scaling alone, not recipe={recipe}": recipe not in ("delayed", "auto"),
        "they add to whole gradients in place, and trainer=fsdp divides these": config.trainer.strategy == "fsdp",
        f"they have no dropout, and model.dropout={dropout:g}": dropout,
        "their attention has no mask, and this is document_mask=true": config.document_mask,
        f"of the penalties they have z_loss alone, and this is penalty.{only}":
            penalty.logit_l2 or penalty.activation_l1,
        f"their backward is in FP8, and this is precision.backward={backward}": backward != "fp8",
        f"they normalise at most {WIDEST_COLUMNS:,} channels, and this is model.n_embd={config.model.n_embd}":
            config.model.n_embd > WIDEST_COLUMNS,
        f"they keep whole blocks in bf16, and precision.keep_bf16 names a part of {block}": block,
    })  # fmt: skip
    if reason:
        return reason
    try:
        return why_not(block_spec(config.model), "they", FUSED_OPTIONS | {Option.DROPOUT})
    except ValueError:  # of a model that does not fit together, which `checks` says
        return None


def _first(reasons: dict[str, object]) -> str | None:
    return next((reason for reason, holds in reasons.items() if holds), None)


def splits_mlp(config: RunConfig) -> bool:
    """Return whether Transformer Engine's own MLP, which is one module, cannot do what is asked of it."""
    return _backward(config) == "bf16" or split_mlp(_kept(config)) is not None


def _backward(config: RunConfig) -> str:
    return getattr(config.precision, "backward", "fp8")


def _kept(config: RunConfig) -> Kept:
    return parse_kept(getattr(config.precision, "keep_bf16", ()), config.model.n_layer)


def _why_not_fp8(config: RunConfig) -> str | None:
    name = config.precision.name
    return f"they are for FP8, and this is precision={name}" if name in ("fp32", "bf16") else None


def why_not_te(config: RunConfig) -> str | None:
    """Return why a run cannot have Transformer Engine's layers, whatever the GPU; None if it can."""
    recipe, backward = config.recipe.name, _backward(config)
    return _first({
        "it is for FP8 and bf16 here, and this is precision=fp32": config.precision.name == "fp32",
        "it has no scale a row, and this is recipe=rowwise (recipe=current has one a tensor)": recipe == "rowwise",
        "it has both products of a backward in FP8 or none, and this is precision.backward=bf16_wgrad":
            backward == "bf16_wgrad",
        "a registered recipe says itself what its backward is in, and this is precision.backward=bf16":
            backward == "bf16" and recipe == "registered",
        "its delayed scaling has no backward in bf16 (recipe=current or block has one)":
            backward == "bf16" and recipe == "delayed",
    })  # fmt: skip


def why_not_torchao(config: RunConfig) -> str | None:
    """Return why a run cannot have torchao's layers, whatever the machine; None if it can."""
    recipe = config.recipe.name
    lacking = f"it has the recipes current (tensorwise) and rowwise, not recipe={recipe}"
    return _why_not_fp8(config) or (lacking if recipe in ("delayed", "block", "mxfp8", "registered") else None)


def why_not_emulated(config: RunConfig) -> str | None:
    """Return why a run cannot have the emulated layers; None if it can."""
    recipe = config.recipe.name
    lacking = f"it has the recipes delayed, current and block, not recipe={recipe}"
    return _why_not_fp8(config) or (lacking if recipe in ("mxfp8", "rowwise", "registered") else None)


WHY_NOT: dict[str, Callable[[RunConfig], str | None]] = {
    "fused": lambda config: _why_not_fp8(config) or why_not_fused(config),
    "te": why_not_te,
    "torchao": why_not_torchao,
    "reference": lambda config: None if _why_not_fp8(config) else "plain torch has no FP8 GEMMs",
    "emulated": why_not_emulated,
}


def why_not_asked(config: RunConfig) -> str | None:
    """Return why no machine can compute a run, of `auto` for Transformer Engine's reason; None if one may."""
    if config.precision.backend != "auto":
        return WHY_NOT[config.precision.backend](config)
    if not isinstance(config.precision, FP8PrecisionConfig):
        return None
    return why_not_fused(config) and why_not_torchao(config) and why_not_te(config)


def check(config: RunConfig) -> Iterator[Problem]:
    """Find requests for a backend, a kernel of attention, or options of them, that no machine can fulfil."""
    name, precision = config.precision.backend, config.precision
    if precision.name == "fp8_e5m2":
        cause = "precision=fp8_e5m2: cuBLASLt has no E5M2 x E5M2 product, and two bits of mantissa are too few"
        yield Problem(cause, "precision=fp8_hybrid", ("precision",))
    if reason := why_not_asked(config):
        cause = f"precision.backend={name} cannot run: {reason}"
        if name == "auto":
            cause = f"no backend can do this in FP8 on a GPU: Transformer Engine: {reason}"
        near = "precision.backend=te" if name == "fused" and config.trainer.strategy == "fsdp" else ""
        yield Problem(cause, near, _OF_PRECISION if name == "auto" else (*_OF_PRECISION, *_OF_LAYERS))
    if isinstance(precision, FP8PrecisionConfig) and precision.fast_accumulation:
        no_sums = "it is for the blocks, and precision.keep_bf16 keeps each of them in bf16"
        if reason := _why_not_only_fused(config) or (no_sums if every_block(_kept(config)) else None):
            yield problem(config, "precision.fast_accumulation", reason)
    if config.compile_mode != "default" and (reason := _why_not_recorded(config)):
        yield problem(config, "compile_mode", reason)
    if config.cuda_graphs is True and (reason := _why_not_only_fused(config)):
        yield problem(config, "cuda_graphs", reason)
    if config.attention in ON_A_GPU and (found := _why_no_attention(config)):
        yield problem(config, f"attention {found[0]}", found[1])


def _why_not_only_fused(config: RunConfig) -> str | None:
    """Return why a run cannot have what the fused layers alone have; None if it can."""
    backend, device = config.precision.backend, config.trainer.accelerator
    other = None if backend in ("auto", "fused") else f"this is precision.backend={backend}"
    other = other or ("they are a GPU's, and this is trainer.accelerator=cpu" if device == "cpu" else None)
    reason = _why_not_fp8(config) or other or why_not_fused(config)
    return f"only the fused FP8 layers have it; {reason}" if reason else None


def _why_not_recorded(config: RunConfig) -> str | None:
    """Return why torch.compile cannot record a run's micro-batches, whatever the GPU; None if it can."""
    precision, dropout = config.precision, config.model.dropout
    plain = "it records the plain-torch layers of bf16 and fp32, and this is"
    return _first({
        f"{plain} precision={precision.name}": precision.name not in ("fp32", "bf16"),
        f"{plain} precision.backend={precision.backend}": precision.backend not in ("auto", "reference"),
        "CUDA graphs are a GPU's, and this is trainer.accelerator=cpu": config.trainer.accelerator == "cpu",
        "it is a mode of torch.compile, and this is compile=false": config.compile is False,
        "a graph cannot gather weights, and this is trainer=fsdp": config.trainer.strategy == "fsdp",
        f"a graph may draw other numbers than an uninterrupted run, and this is model.dropout={dropout:g}": dropout,
    })  # fmt: skip


def _why_no_attention(config: RunConfig) -> tuple[str, str] | None:
    """Return the other key and the reason why no machine can take a kernel; None if nothing speaks against it."""
    kernel, precision = config.attention, config.precision
    plain_backends = ("auto", "reference") if precision.name in ("fp32", "bf16") else ("torchao", "emulated")
    reasons = {
        ("document_mask", "it takes no mask"): config.document_mask,
        ("trainer.accelerator", "its kernels are a GPU's"): config.trainer.accelerator == "cpu",
        ("precision.name", "its kernels take bfloat16"): precision.name == "fp32",
        ("precision.backend", "only the FP8 layers and precision.backend=te have it"):
            kernel == "te" and precision.backend in plain_backends,
        ("trainer.deterministic", "torch's cuDNN kernel is not deterministic"):
            kernel == "cudnn" and config.trainer.deterministic,
    }  # fmt: skip
    return next((found for found, holds in reasons.items() if holds), None)
