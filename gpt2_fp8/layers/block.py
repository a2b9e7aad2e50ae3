"""A decoder's block from single layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.embedding import embed


class Block(nn.Module):
    """Attention and a perceptron, each added to the residual stream. x: [batch, tokens, n_embd]."""

    def __init__(self, config: ModelConfig, layers: Any, fp8: bool, recompute: bool):
        super().__init__()
        n_embd, bias = config.n_embd, config.bias
        self.qkv = layers.layer_norm_linear(n_embd, 3 * n_embd, bias, fp8)
        self.attention = layers.attention(config.n_head, n_embd, config.dropout)
        self.projection = layers.linear(n_embd, n_embd, bias, fp8)
        self.mlp = layers.layer_norm_mlp(n_embd, bias, fp8, recompute)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        y = self.attention(self.qkv(x, is_first_microbatch))
        x = x + self.dropout(self.projection(y, is_first_microbatch))
        return x + self.dropout(self.mlp(x, is_first_microbatch))


class Composed:
    """The family of a module that offers the five layers named in the package."""

    scales: Scales | None = None
    embed = staticmethod(embed)

    def __init__(self, layers: Any, recompute: bool):
        self.layers, self.recompute = layers, recompute

    def block(self, config: ModelConfig, fp8: bool) -> nn.Module:
        """See `layers.Family`."""
        return Block(config, self.layers, fp8, self.recompute)

    def head(self, n_embd: int, rows: int, fp8: bool) -> nn.Module:
        """See `layers.Family`."""
        return self.layers.head(n_embd, rows, fp8)
