"""The third family: the fused FP8 block, head and embedding."""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from gpt2_fp8.config.block_spec import FUSED_OPTIONS, BlockSpec, why_not
from gpt2_fp8.config.kept_layers import ALL_PARTS, NO_PARTS, Part
from gpt2_fp8.layers import te
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales
from gpt2_fp8.layers.embedding import fused_embed
from gpt2_fp8.layers.fused import Block
from gpt2_fp8.layers.head import Head


class Fused:
    """The fused layers. A block or head that must stay in bf16 is built from Transformer Engine's layers."""

    embed = staticmethod(fused_embed)

    def __init__(self, settings: DelayedScaling, recompute: bool):
        self.scales: Scales | None = Scales(settings)
        self.recompute = recompute
        self._bf16 = Composed(te, recompute)
        self._below: Block | None = None  # the last block built, if it is a fused one

    def why_not(self, spec: BlockSpec) -> str | None:
        """See `layers.Family`."""
        return why_not(spec, "the fused layers", FUSED_OPTIONS)

    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        """See `layers.Family`. Blocks are in FP8 or not: `config.backend_support` refuses parts."""
        assert fp8 in (ALL_PARTS, NO_PARTS)
        assert self.scales is not None
        if not fp8:
            self._below = None
            return self._bf16.block(spec, NO_PARTS)
        self._below = Block(spec, self.scales, self.recompute, self._below)
        return self._below

    def head(self, spec: BlockSpec, padded_vocab_size: int, fp8: bool) -> nn.Module:
        """See `layers.Family`."""
        assert self.scales is not None
        return (
            Head(spec, padded_vocab_size, self.scales) if fp8 else self._bf16.head(spec, padded_vocab_size, fp8=False)
        )
