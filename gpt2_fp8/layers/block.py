"""A decoder's block built from single layers, as its `BlockSpec` says, and the families, which build them."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.config.kept_layers import MLP, Part
from gpt2_fp8.config.schema import AttentionKernel, Recompute
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.reference import Product


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream. x: [batch, tokens, n_embd].

    `recompute`: "mlp" computes the MLP's hidden layer again in the backward; "full" the whole block, and keeps x alone.
    `kernel`: what computes attention.
    """

    def __init__(
        self, spec: BlockSpec, layers: Any, fp8: Set[Part], recompute: Recompute, kernel: AttentionKernel = "auto"
    ):
        super().__init__()
        self.again = layers.again if recompute == "full" else None
        n_embd, heads, bias = spec.n_embd, spec.heads, spec.bias
        self.qkv = layers.layer_norm_linear(n_embd, heads.packed, spec.norm, bias, "qkv" in fp8)
        self.attention = layers.attention(heads, spec.dropout, spec.norm.epsilon, kernel)
        self.projection = layers.linear(heads.queries, n_embd, bias, "projection" in fp8)
        self.mlp = layers.layer_norm_mlp(n_embd, spec.mlp, spec.norm, bias, fp8 & MLP, recompute == "mlp")
        self.draws = spec.dropout > 0
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None, angle: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Compute the block. See `Composed.block`."""
        if self.again is None:
            return self._forward(x, is_first_microbatch, angle, mask)
        return self.again(self._forward, x, is_first_microbatch, angle, mask, draws=self.draws)

    def _forward(
        self, x: Tensor, is_first_microbatch: bool | None, angle: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        y = self.attention(self.qkv(x, is_first_microbatch), angle, mask)
        return self.after_attention(x, y, is_first_microbatch)

    def after_attention(self, x: Tensor, y: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute the rest of the block from its input `x` and what attention returns, `y`, [..., heads.queries]."""
        x = self.add(x, self.dropout(self.projection(y, is_first_microbatch)))
        return self.add(x, self.dropout(self.mlp(x, is_first_microbatch)))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the result `y` of a branch to the residual stream `x`. Both: [batch, tokens, n_embd]."""
        return x + y


def embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Compute tokens[ids] + positions in plain torch, in the autocast dtype or else the parameters'.

    ids: integers [batch, T]; tokens [padded_vocab_size, d]; positions [P, d], T <= P, or None: there is no such table.
    """
    x = F.embedding(ids, tokens)
    if positions is not None:
        x = x + positions[: ids.shape[1]]
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


class Composed:
    """A family: what a decoder is built from, of a module that offers the layers named in the package `layers`.

    `fp8` says which GEMMs are in FP8; the others are in bf16.

    Attributes:
        scales: the FP8 tensors' state, if the family keeps it itself.
    """

    scales: Scales | None = None
    embed = staticmethod(embed)

    @staticmethod
    def turns(angle: Tensor) -> Any:
        """Return what blocks are given of `reference.angles`, computed once for all of them."""
        return angle

    def __init__(self, layers: Any, recompute: Recompute, kernel: AttentionKernel = "auto"):
        self.layers, self.recompute, self.kernel = layers, recompute, kernel

    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        """Build one block, whose parts `fp8` are in FP8.

        It is called as `block(x, is_first_microbatch)`; with RoPE also with the family's `turns`. With `document_mask`
        it gets these or None, and `sdpa.within_documents`. x: [batch, tokens, n_embd]; so is what it returns.
        """
        return Block(spec, self.layers, fp8, self.recompute, self.kernel)

    def head(self, spec: BlockSpec, padded_vocab_size: int, fp8: bool) -> nn.Module:
        """Build the head. It is called as `head(x, is_first_microbatch)`.

        It returns logits [batch, tokens, padded_vocab_size]. Its parameters are `layer_norm_weight`, `layer_norm_bias`
        (LayerNorm alone) and `weight`. It may offer `loss(...)`: see `head.Head`.
        """
        return self.layers.head(spec.n_embd, padded_vocab_size, spec.norm, fp8)


class WithProducts(Composed):
    """The plain-torch layers; what is in FP8 has other products, in blocks and in the head."""

    def __init__(self, block: Product, head: Product, recompute: Recompute, kernel: AttentionKernel = "auto"):
        super().__init__(reference, recompute, kernel)
        self.block_product, self.head_product = block, head

    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        """See `Composed`."""
        made = super().block(spec, fp8)
        for part in fp8:
            put_product(made, part, self.block_product)
        return made

    def head(self, spec: BlockSpec, padded_vocab_size: int, fp8: bool) -> nn.Module:
        """See `Composed`."""
        made: Any = super().head(spec, padded_vocab_size, fp8)
        if fp8:
            made.product = self.head_product
        return made


def product_place(block: Any, part: Part) -> tuple[nn.Module, str]:
    """Return which layer of a block of plain-torch layers has a part's product, and under which name."""
    return (block.mlp, f"{part}_product") if part in MLP else (getattr(block, part), "product")


def put_product(block: Any, part: Part, product: Product) -> None:
    """Have a block of plain-torch layers compute a part by `product`."""
    owner, name = product_place(block, part)
    setattr(owner, name, product)
