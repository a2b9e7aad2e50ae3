"""The emulated layers: the plain-torch layers, with GEMMs whose operands are cast to FP8 and back.

They show what FP8 does to training, one operand at a time and without a GPU. Each operand has a switch
(`precision.emulate`, see `emulated_gemm`). Two more switches follow the fused layers:

- `residual`: a branch is added to the residual stream before its result is rounded to bfloat16. The gradient of the
  residual stream is quantized before it is rounded, too. Without it, both are rounded first, as in separate modules.
- `head`: the head's GEMMs are in FP8. See `emulated_head`. `head_weight` and the like are its operands by themselves.

Normalisation, GELU and attention are the plain-torch layers'. FP8 operands are cast from the float32 results of the
first two, as the kernels of the other FP8 layers do. There is one exception: on a CPU without `residual`, autocast
leaves normalisation in bfloat16.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import EMULATED_OPTIONS, MLP, BlockSpec, Heads, Norm, why_not
from gpt2_fp8.config.kept_layers import Part
from gpt2_fp8.config.schema import AttentionKernel, Recompute
from gpt2_fp8.layers import block, reference
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales
from gpt2_fp8.layers.embedding import embed
from gpt2_fp8.layers.emulated_gemm import Emulation, round_to_bf16
from gpt2_fp8.layers.emulated_head import Head
from gpt2_fp8.layers.emulated_product import Product, in_bf16
from gpt2_fp8.layers.emulated_scales import EmulatedScales

NAME = "the emulated layers"
OFFERS = EMULATED_OPTIONS


class Emulated:
    """The family of the emulated layers. A part that stays in bf16 is built from the plain-torch layers."""

    def __init__(
        self,
        emulation: Emulation,
        delayed: DelayedScaling | None,
        recompute: Recompute,
        kernel: AttentionKernel = "auto",
    ):
        self._scales = EmulatedScales(delayed) if delayed else None
        self.scales: Scales | None = self._scales
        self.emulation, self.recompute, self.kernel = emulation, recompute, kernel
        self._residual = "residual" in emulation.switches

    def embed(self, ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """See `layers.Family`. The residual stream holds bfloat16's numbers, in float32 if it is added before rounding.

        Its gradient in float32 is then still there when a branch quantizes it.
        """
        x = embed(ids, tokens, positions)
        return x.float() if self._residual else x

    def why_not(self, spec: BlockSpec) -> str | None:
        """See `layers.Family`."""
        return why_not(spec, NAME, OFFERS)

    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        """See `layers.Family`."""
        layers: Any = Layers(self.emulation, self._scales) if fp8 else reference
        return Block(spec, layers, fp8, self.recompute, self.kernel, self._residual)

    def head(self, spec: BlockSpec, padded_vocab_size: int, fp8: bool) -> nn.Module:
        """See `layers.Family`."""
        if not fp8 or not self.emulation.has_head:
            return reference.head(spec.n_embd, padded_vocab_size, spec.norm, fp8=False)
        return Head(spec.n_embd, padded_vocab_size, spec.norm, self.emulation, self._scales)


class Block(block.Block):
    """A block whose residual stream is added as `residual` says."""

    def __init__(
        self,
        spec: BlockSpec,
        layers: Any,
        fp8: Set[Part],
        recompute: Recompute,
        kernel: AttentionKernel,
        residual: bool,
    ):
        super().__init__(spec, layers, fp8, recompute, kernel)
        self.residual = residual

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """See `block.Block`."""
        return _AddOnce.apply(x, y.float()) if self.residual else super().add(x, y)


class _AddOnce(torch.autograd.Function):
    """The sum of the residual stream and a branch, rounded once. The branch gets the gradient unrounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return round_to_bf16(x + y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return round_to_bf16(upstream[0]), upstream[0]


class Layers:
    """What `block.Block` builds a block from: the plain-torch layers, with products in the emulated form."""

    again = staticmethod(reference.again)

    def __init__(self, emulation: Emulation, scales: EmulatedScales | None):
        self._emulated = emulation, scales
        self._rounded = "residual" not in emulation.switches

    def _into_residual(self) -> Product:
        return Product(*self._emulated, self._rounded, torch.bfloat16 if self._rounded else torch.float32)

    def layer_norm_linear(self, in_features: int, out_features: int, norm: Norm, bias: bool, fp8: bool) -> nn.Module:
        """See the package."""
        made = reference.LayerNormLinear(in_features, out_features, norm, bias)
        if fp8:
            made.product = Product(*self._emulated)
        return made

    def linear(self, in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module:
        """See the package. Its result goes into the residual stream."""
        made = reference.Linear(in_features, out_features, bias)
        if fp8:
            made.product = self._into_residual()
        return made

    def layer_norm_mlp(
        self, n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: Set[Part], recompute: bool
    ) -> nn.Module:
        """See the package. Its result goes into the residual stream.

        The hidden layer has bfloat16's numbers. It is in float32, so that GELU's result and gradient are.
        """
        made = reference.LayerNormMLP(n_embd, mlp, norm, bias, recompute)
        if fp8:
            made.fc1_product = Product(*self._emulated, dtype=torch.float32) if "fc1" in fp8 else in_bf16
        if "fc2" in fp8:
            made.fc2_product = self._into_residual()
        return made

    def attention(self, heads: Heads, dropout: float, epsilon: float, kernel: AttentionKernel) -> nn.Module:
        """See the package."""
        return reference.attention(heads, dropout, epsilon, kernel)
