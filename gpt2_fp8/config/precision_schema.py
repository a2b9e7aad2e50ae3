"""The keys of `precision` and `recipe`: in which format a run computes, and where its scales come from.

Each choice has a class, distinguished by `name`. docs/fp8.md has what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gpt2_fp8.config.ranges import Steps, at_least


@dataclass(frozen=True, kw_only=True)
class PlainPrecisionConfig:
    """fp32: everything in float32. bf16: float32 weights, bfloat16 autocast."""

    name: Literal["fp32", "bf16"]
    backend: Literal[
        "auto", "fused", "te", "torchao", "reference", "emulated"
    ]  # what computes it; auto: reference, plain torch (compiled)


@dataclass(frozen=True, kw_only=True)
class FP8PrecisionConfig:
    """float32 weights, bfloat16 activations, FP8 matrix products.

    `conf/` gives `evaluation` to a new run. The default here is what a checkpoint without that key was trained with.
    """

    name: Literal["fp8_hybrid", "fp8_e4m3", "fp8_e5m2"]  # hybrid: E4M3 forward, E5M2 gradients; e4m3: but the head's
    keep_bf16: list[str]  # layers whose products stay in bf16 (config/kept_layers.py has the names and patterns)
    backward: Literal["fp8", "bf16", "bf16_wgrad"] = "fp8"  # or both products of the backward in bf16, or one
    # our fused chain, Transformer Engine, torchao's float8, or FP8 emulated in plain torch on any device; auto: the
    # first of fused, te and torchao that can
    backend: Literal["auto", "fused", "te", "torchao", "reference", "emulated"]
    evaluation: Literal["fp8", "bf16"] = "fp8"  # what validation, samples and logits compute in; an export has no FP8
    bf16_last_steps: Steps = 0  # how many steps at the end of the run compute in bf16
    fast_accumulation: bool  # sum the blocks' input gradients in the tensor cores alone, to some 14 bits (fused layers)
    fallback: Literal["allow", "error"]  # when this machine cannot do FP8: train in bf16 (fp32 on a CPU), or exit 2


@dataclass(frozen=True, kw_only=True)
class DelayedRecipe:
    """Scales from the largest values of past steps: one read of each tensor, the fastest."""

    name: Literal["delayed"]
    margin: Annotated[int, at_least(0, 100, "powers of two")]  # powers of two of headroom left in every scale
    amax_history_len: Annotated[int, at_least(1, 10**6, "steps")]  # steps remembered
    amax_compute_algo: Literal["max", "most_recent"]


@dataclass(frozen=True, kw_only=True)
class StatelessRecipe:
    """current: a scale from the tensor itself. rowwise: one a row. block: one per 128 values. mxfp8: one per 32."""

    name: Literal["current", "rowwise", "block", "mxfp8"]


@dataclass(frozen=True, kw_only=True)
class AutoRecipe:
    """The backend's own."""

    name: Literal["auto"]
    delayed: DelayedRecipe  # what it is where it is delayed scaling
