"""The linear layers and the MLP in the emulated form: those in plain torch, with GEMMs of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.config.block_spec import MLP, Norm
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.delayed_scaling import Place
from gpt2_fp8.layers.emulated_gemm import NO_SLOTS, Emulation, linear
from gpt2_fp8.layers.emulated_scales import EmulatedScales


class Gemm:
    """The GEMMs of one weight: how operands are cast, and the places of their scales.

    `rounded`: whether the result is rounded to bfloat16 (and then is of that dtype).
    """

    def __init__(self, emulation: Emulation, scales: EmulatedScales | None, rounded: bool = True):
        self.casts, self.rounded, self.scales = emulation.casts(), rounded, scales
        self.places: dict[str, Place] = {}  # of the tensors' scales, by "input", "weight" and "gradient"
        if scales is not None:
            self.places = {name: scales.reserve("forward") for name in ("input", "weight")}
            self.places["gradient"] = scales.reserve("gradient")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b, float32. See `emulated_gemm.linear`."""
        slots = NO_SLOTS
        if self.scales is not None:
            slots = self.scales.slots(self.places["input"], self.places["gradient"])
        return linear(x, weight, bias, self.casts, slots, self.rounded)

    def result(self, y: Tensor) -> Tensor:
        """Return a result of `__call__` in the dtype in which it goes on."""
        return y.to(torch.bfloat16) if self.rounded else y


class PlainGemm:
    """The GEMMs of one weight in bfloat16, as autocast computes them in the plain-torch layers."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b, float32 with bfloat16's numbers."""
        return F.linear(x, weight, bias).float()

    def result(self, y: Tensor) -> Tensor:
        """Return `y` in bfloat16."""
        return y.to(torch.bfloat16)


class LayerNormLinear(reference.LayerNormLinear):
    """See `reference.LayerNormLinear`."""

    def __init__(self, in_features: int, out_features: int, norm: Norm, bias: bool, gemm: Gemm):
        super().__init__(in_features, out_features, norm, bias)
        self.gemm = gemm

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y, bfloat16. `is_first_microbatch` has no effect here."""
        x = F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.epsilon)
        return self.gemm.result(self.gemm(x, self.weight, self.bias))


class Linear(reference.Linear):
    """See `reference.Linear`."""

    def __init__(self, in_features: int, out_features: int, bias: bool, gemm: Gemm):
        super().__init__(in_features, out_features, bias)
        self.gemm = gemm

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y, as `Gemm` rounds it. `is_first_microbatch` has no effect here."""
        return self.gemm.result(self.gemm(x, self.weight, self.bias))


class LayerNormMLP(reference.LayerNormMLP):
    """See `reference.LayerNormMLP`."""

    def __init__(
        self,
        n_embd: int,
        mlp: MLP,
        norm: Norm,
        bias: bool,
        recompute: bool,
        gemms: tuple[Any, Any],
    ):
        super().__init__(n_embd, mlp, norm, bias, recompute)
        self.fc1, self.fc2 = gemms

    def _forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.epsilon)
        h = self.fc1(x, self.fc1_weight, self.fc1_bias)  # bfloat16's numbers; float32, so that its gradient is
        z = F.gelu(h, approximate="tanh")
        return self.fc2.result(self.fc2(z, self.fc2_weight, self.fc2_bias))
