"""The description of a decoder's block, from which layers are built.

`block_spec` derives it from a configuration. Parameter names, their initial values, parameter counts and FLOPs follow
from it too (`model.parameters`). `config.backend_support` says which layers have which options. Like all of this
package it needs no torch: a shape is refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from gpt2_fp8.config.schema import ModelConfig


class Option(StrEnum):
    """Something that a block can have and a set of layers may lack. The values are a user's words."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"
    GELU = "a GELU MLP"
    SWIGLU = "a SwiGLU MLP"
    RELU_SQUARED = "a squared-ReLU MLP"
    LEARNED_POSITIONS = "learned positions"
    ROPE = "RoPE"
    SCALED_ROPE = "scaled RoPE"
    GROUPED_HEADS = "grouped-query attention"
    OWN_HEAD_SIZE = "a head size other than n_embd / n_head"
    QK_NORM = "QK-norm"
    BIAS = "biases"
    DROPOUT = "dropout"
    UNTIED_HEAD = "a head that is not tied to the embedding"


GPT2_OPTIONS = frozenset({Option.LAYER_NORM, Option.GELU, Option.LEARNED_POSITIONS, Option.BIAS, Option.DROPOUT})
# here, since a configuration is refused before the layers are imported
FUSED_OPTIONS = frozenset(Option) - {Option.SWIGLU, Option.GROUPED_HEADS, Option.DROPOUT}

ROPE_BASE = 10000.0  # where a configuration names none (Su et al. 2021)


@dataclass(frozen=True)
class Norm:
    """A normalisation. Only LayerNorm has a bias, whatever `BlockSpec.bias` says."""

    kind: Literal["layer_norm", "rms_norm"]
    epsilon: float  # added to the variance, or to the mean square


@dataclass(frozen=True)
class MLP:
    """The MLP between two projections. The gate is the first half of what SwiGLU's first projection gives."""

    # gelu: in its tanh form. swiglu: SiLU(gate) times the rest (Shazeer 2020). relu_squared: So et al. 2021
    kind: Literal["gelu", "swiglu", "relu_squared"]
    width: int  # channels of the hidden layer

    @property
    def projected(self) -> int:
        """The channels that the first projection gives: a gated MLP has the gate beside the hidden layer."""
        return 2 * self.width if self.kind == "swiglu" else self.width


@dataclass(frozen=True)
class Heads:
    """The shape of causal attention. Several heads may share the keys and values of one."""

    n_head: int
    n_kv_head: int
    size: int  # channels of a head
    qk_norm: bool = False  # RMSNorm of queries and keys, head by head

    @property
    def queries(self) -> int:
        """The channels of all heads' queries, and of what attention returns."""
        return self.n_head * self.size

    @property
    def keys(self) -> int:
        """The channels of all keys, and as many of all values."""
        return self.n_kv_head * self.size

    @property
    def packed(self) -> int:
        """The channels of queries, keys and values side by side."""
        return self.queries + 2 * self.keys


@dataclass(frozen=True)
class Bands:
    """Which rotations are scaled, by how often they turn within the context that a model was first trained on.

    Those that turn at most `low` times are scaled in full, and those that turn `high` times or more are not. Between
    the two, the part that is scaled falls linearly (Llama 3.1, Grattafiori et al. 2024).
    """

    low: float
    high: float
    original_positions: int


@dataclass(frozen=True)
class RoPE:
    """Rotary positions (Su et al. 2021). Channel i of a head's first half is turned with channel i of its second."""

    base: float
    scaling: float = 1.0  # positions are divided by this
    bands: Bands | None = None  # None: for all channels (Chen et al. 2023)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One block, and what embedding and head share with it. Raises ValueError with everything that does not fit."""

    n_embd: int  # channels of the residual stream
    norm: Norm
    heads: Heads
    mlp: MLP
    positions: Literal["learned"] | RoPE
    bias: bool  # of the projections
    dropout: float  # a probability: after the embedding, in attention, and after both branches
    tied: bool  # the head's weight is the embedding's

    def __post_init__(self) -> None:
        heads, rope = self.heads, self.positions if isinstance(self.positions, RoPE) else None
        bands = rope.bands if rope else None
        if min(self.n_embd, heads.n_head, heads.n_kv_head, heads.size, self.mlp.width) < 1:
            raise ValueError("every width and number of heads is at least 1")
        wrong = {
            f"{heads.n_head} heads do not share {heads.n_kv_head} key-value heads": heads.n_head % heads.n_kv_head,
            f"RoPE turns pairs of channels, and a head has {heads.size}": rope and heads.size % 2,
            "RoPE's base and scaling are above 0": rope and min(rope.base, rope.scaling) <= 0,
            "RoPE's low frequency factor is above 0 and below the high one": bands and not 0 < bands.low < bands.high,
            "a normalisation's epsilon is above 0": self.norm.epsilon <= 0,
            "dropout is at least 0 and below 1": not 0 <= self.dropout < 1,
        }
        if found := [reason for reason, holds in wrong.items() if holds]:
            raise ValueError("; ".join(found))

    def options(self) -> frozenset[Option]:
        """Return what layers must have to compute this block."""
        heads, rope = self.heads, self.positions if isinstance(self.positions, RoPE) else None
        wanted = {
            Option.LAYER_NORM: self.norm.kind == "layer_norm",
            Option.RMS_NORM: self.norm.kind == "rms_norm",
            Option.GELU: self.mlp.kind == "gelu",
            Option.SWIGLU: self.mlp.kind == "swiglu",
            Option.RELU_SQUARED: self.mlp.kind == "relu_squared",
            Option.LEARNED_POSITIONS: rope is None,
            Option.ROPE: rope is not None,
            Option.SCALED_ROPE: rope is not None and rope.scaling != 1,
            Option.GROUPED_HEADS: heads.n_kv_head != heads.n_head,
            Option.OWN_HEAD_SIZE: heads.queries != self.n_embd,
            Option.QK_NORM: heads.qk_norm,
            Option.BIAS: self.bias,
            Option.DROPOUT: self.dropout > 0,
            Option.UNTIED_HEAD: not self.tied,
        }
        return frozenset(option for option, is_wanted in wanted.items() if is_wanted)


def why_not(spec: BlockSpec, layers: str, offers: Set[Option]) -> str | None:
    """Name the options of `spec` that `layers` (a name for people) lack; None if they have all of them."""
    missing = [str(option) for option in Option if option in spec.options() - offers]
    if not missing:
        return None
    return f"{layers} have no {', no '.join(option.removeprefix('a ') for option in missing)}"


def cudnn_takes(size: int) -> bool:
    """Return whether cuDNN's fused attention can train with heads of a size. Other heads have slower kernels."""
    return size % 8 == 0 and size <= 256  # on Hopper (TE fused_attn.cpp; other GPUs: up to 128)


def gpt2_heads(n_head: int, n_embd: int) -> Heads:
    """Describe GPT-2's attention: heads that share `n_embd` in equal parts. Raises ValueError if they cannot."""
    if n_head < 1 or n_embd % n_head:
        raise ValueError(f"{n_head} heads do not share {n_embd} channels in equal parts")
    return Heads(n_head, n_head, n_embd // n_head)


def block_spec(config: ModelConfig) -> BlockSpec:
    """Describe the block of a configuration. Raises ValueError with everything that does not fit together."""
    n_kv_head = config.n_kv_head or config.n_head
    size = config.head_size or gpt2_heads(config.n_head, config.n_embd).size
    return BlockSpec(
        n_embd=config.n_embd,
        norm=Norm(config.norm, config.norm_epsilon),
        heads=Heads(config.n_head, n_kv_head, size, config.qk_norm),
        mlp=MLP(config.mlp, config.mlp_width or 4 * config.n_embd),
        positions="learned" if config.positions == "learned" else _rope(config),
        bias=config.bias,
        dropout=config.dropout,
        tied=config.tied_head,
    )


def _rope(config: ModelConfig) -> RoPE:
    low, high, original = config.rope_low_freq_factor, config.rope_high_freq_factor, config.rope_original_positions
    bands = Bands(low, high, original) if low and high and original else None
    return RoPE(config.rope_base or ROPE_BASE, config.rope_scaling or 1.0, bands)
