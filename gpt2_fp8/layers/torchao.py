"""The plain-torch layers with torchao's float8 products. `torch.compile` fuses their casts with what is around them.

Residual stream, normalisation, activation and attention are the plain-torch layers'.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import nn

from gpt2_fp8.compat.torchao import Float8Product
from gpt2_fp8.config.block_spec import ALL_OPTIONS, MLP, Heads, Norm
from gpt2_fp8.config.kept_layers import Part
from gpt2_fp8.config.schema import AttentionKernel
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.reference import Product


class Layers:
    """What `block.Composed` builds blocks and a head from.

    Args:
        block: torchao's `Float8LinearConfig` of the blocks' products.
        head: that of the head's.
        weight_dtype: what weights are converted to before their product; None: they are not.
    """

    NAME = "torchao's layers"
    OFFERS = ALL_OPTIONS
    again = staticmethod(reference.again)

    def __init__(self, block: Any, head: Any, weight_dtype: torch.dtype | None = None):
        self.product: Product = Float8Product(block, weight_dtype)
        self.head_product: Product = Float8Product(head, weight_dtype)

    def layer_norm_linear(self, in_features: int, out_features: int, norm: Norm, bias: bool, fp8: bool) -> nn.Module:
        """See the package."""
        made = reference.LayerNormLinear(in_features, out_features, norm, bias)
        if fp8:
            made.product = self.product
        return made

    def linear(self, in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module:
        """See the package."""
        made = reference.Linear(in_features, out_features, bias)
        if fp8:
            made.product = self.product
        return made

    def layer_norm_mlp(
        self, n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: Set[Part], recompute: bool
    ) -> nn.Module:
        """See the package."""
        made = reference.LayerNormMLP(n_embd, mlp, norm, bias, recompute)
        if "fc1" in fp8:
            made.fc1_product = self.product
        if "fc2" in fp8:
            made.fc2_product = self.product
        return made

    def head(self, n_embd: int, padded_vocab_size: int, norm: Norm, fp8: bool) -> nn.Module:
        """See the package."""
        made = reference.LayerNormLinear(n_embd, padded_vocab_size, norm, bias=False)
        if fp8:
            made.product = self.head_product
        return made

    def attention(self, heads: Heads, dropout: float, epsilon: float, kernel: AttentionKernel) -> nn.Module:
        """See the package."""
        return reference.attention(heads, dropout, epsilon, kernel)
