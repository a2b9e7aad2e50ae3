"""The product of one weight in the emulated form: what `reference.Product` is, with its operands cast to FP8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.layers.delayed_scaling import Place
from gpt2_fp8.layers.emulated_gemm import NO_SLOTS, Emulation, linear
from gpt2_fp8.layers.emulated_scales import EmulatedScales


class Product:
    """Computes x W^T + b and its gradients: how operands are cast, and the places of their scales.

    `rounded`: whether the result is rounded to bfloat16. `dtype`: in which the result goes on.
    """

    def __init__(
        self,
        emulation: Emulation,
        scales: EmulatedScales | None,
        rounded: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.casts, self.rounded, self.dtype, self.scales = emulation.casts(), rounded, dtype, scales
        self.places: dict[str, Place] = {}  # of the tensors' scales, by "input", "weight" and "gradient"
        if scales is not None:
            self.places = {name: scales.reserve("forward") for name in ("input", "weight")}
            self.places["gradient"] = scales.reserve("gradient")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b. See `emulated_gemm.linear`."""
        slots = NO_SLOTS
        if self.scales is not None:
            slots = self.scales.slots(self.places["input"], self.places["gradient"])
        return linear(x, weight, bias, self.casts, slots, self.rounded).to(self.dtype)


def in_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b as autocast does in the plain-torch layers: bfloat16's numbers, in float32."""
    return F.linear(x, weight, bias).float()
