"""The emulated layers: the plain-torch layers, with the operands of the blocks' GEMMs cast to FP8 and back.

They show what FP8 does to training without a GPU for it. The head stays in bf16. As in the fused layers, the residual
stream is rounded once: a branch's result is added to it unrounded, and its gradient is quantized unrounded.
Normalisation, activation and attention are the plain-torch layers'.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.config.kept_layers import MLP, PARTS, Part
from gpt2_fp8.config.schema import AttentionKernel, Recompute
from gpt2_fp8.layers import block, reference
from gpt2_fp8.layers.delayed_scaling import DelayedScaling
from gpt2_fp8.layers.embedding import embed
from gpt2_fp8.layers.emulated_product import EmulatedScales, Emulation, Product, round_to_bf16

# Results that go into the residual stream are not rounded. GELU and its gradient are computed in float32.
_RESULTS = {"qkv": (True, torch.bfloat16), "projection": (False, torch.float32),
            "fc1": (True, torch.float32), "fc2": (False, torch.float32)}  # fmt: skip


class Emulated(block.Composed):
    """The family of the emulated layers. A part that stays in bf16 is the plain-torch layers'."""

    def __init__(
        self, how: Emulation, delayed: DelayedScaling | None, recompute: Recompute, kernel: AttentionKernel = "auto"
    ):
        super().__init__(reference, recompute, kernel)
        self.how, self._emulated = how, EmulatedScales(delayed) if delayed else None
        self.scales = self._emulated

    @staticmethod
    @override
    def embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """See `layers.Family`. The residual stream holds bfloat16's numbers, in float32: so its gradient is, too."""
        return embed(ids, tokens, positions).float()

    @override
    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        made = _Block(spec, reference, fp8, self.recompute, self.kernel)
        if fp8 & MLP:
            made.mlp.fc1_product = _in_float32
        for part in PARTS:
            if part in fp8:
                owner, name = (made.mlp, f"{part}_product") if part in MLP else (getattr(made, part), "product")
                setattr(owner, name, Product(self.how, self._emulated, *_RESULTS[part]))
        return made


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b as autocast does in the plain-torch layers: bfloat16's numbers, in float32."""
    return F.linear(x, weight, bias).float()


class _Block(block.Block):
    @override
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return _AddOnce.apply(x, y.float())


class _AddOnce(torch.autograd.Function):
    """The sum of the residual stream and a branch, rounded once. The branch gets the gradient unrounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return round_to_bf16(x + y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return round_to_bf16(upstream[0]), upstream[0]
