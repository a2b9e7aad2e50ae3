"""The third family: the fused FP8 block, head and embedding."""

from __future__ import annotations

from torch import nn

from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.layers import te
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales
from gpt2_fp8.layers.embedding import fused_embed
from gpt2_fp8.layers.fused import Block
from gpt2_fp8.layers.head import Head


class Fused:
    """A block or head that is to stay in bf16 is Transformer Engine's."""

    embed = staticmethod(fused_embed)

    def __init__(self, settings: DelayedScaling, recompute: bool):
        self.scales: Scales | None = Scales(settings)
        self.recompute = recompute
        self._bf16 = Composed(te, recompute)
        self._below: Block | None = None  # the last block built, where it is one of ours

    def block(self, config: ModelConfig, fp8: bool) -> nn.Module:
        """See `layers.Family`. `config.dropout` must be 0."""
        assert config.dropout == 0
        assert self.scales is not None
        if not fp8:
            self._below = None
            return self._bf16.block(config, fp8=False)
        self._below = Block(config, self.scales, self.recompute, self._below)
        return self._below

    def head(self, n_embd: int, rows: int, fp8: bool) -> nn.Module:
        """See `layers.Family`."""
        assert self.scales is not None
        return Head(n_embd, rows, self.scales) if fp8 else self._bf16.head(n_embd, rows, fp8=False)
