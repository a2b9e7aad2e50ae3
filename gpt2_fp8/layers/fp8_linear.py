"""One weight's three FP8 GEMMs: forward, the gradient of its input, and its own gradient; and an MLP's activation.

Shapes: x [M, K] is the input, y = x W^T + b [M, N] the output. `x8` is x in FP8 [M, K], `x8t` its transpose [K, M].
M = batch * tokens rows, d = n_embd, f = hidden channels.

Hopper's tensor cores keep about 14 bits of a sum. A GEMM can promote its partial sums to float32 on the way, or not
("fast accumulation"). Forward GEMMs do not promote, as Transformer Engine's do not.

The blocks' input gradients use fast accumulation only if the user asks for it. Its error is 0.07 to 0.15 % for sums
over 2,304 to 6,400 channels. The input gradient that passes the activation's derivative in the same kernel
(`kernels.product`) always uses it. Its error is 0.04 %; rounding to bfloat16 in between would cost 0.17 %.

Where it fits, the activation and its derivative are inside the GEMMs. Then its input h is not stored: the backward
keeps the result z in FP8, and with GELU its derivative's codes, as many bytes. Nothing of the hidden layer is
transposed: its weight gradients take one operand as it is (`kernels.weight_gradient`). Elsewhere a kernel of its own
follows cuBLASLt's GEMMs (`kernels.activation`), and h is kept in bfloat16.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from gpt2_fp8.kernels.activation import activation_backward_cast, activation_cast
from gpt2_fp8.kernels.cast import cast_transpose, reduce_columns
from gpt2_fp8.kernels.formats import Slot
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.product import Activated, Kind, Operands, fits, product_activation, product_activation_backward
from gpt2_fp8.kernels.weight_gradient import weight_gradient
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.reference import LayerNormMLP


class FP8Linear(nn.Module):
    """The FP8 side of one weight [N, K]: its FP8 copies, and the places of its tensors' scales.

    The copies are kept until the next `refresh`. It holds no parameter, so that parameter names stay the layers'.
    `own_gradient=False`: the caller knows the scale of y's gradient itself.
    """

    w8: Tensor  # [N, K]
    w8t: Tensor  # [K, N]
    bias: Tensor | None  # bfloat16 [N]: for bfloat16 output cuBLASLt adds no other dtype

    def __init__(self, scales: Scales, own_gradient: bool = True):
        super().__init__()
        self.scales = [scales]  # in a list, so that torch does not register it in every layer: it is the model's
        self.places = {"input": scales.reserve("forward"), "weight": scales.reserve("forward")}
        if own_gradient:
            self.places["gradient"] = scales.reserve("gradient")
        self.bias = None

    def slot(self, name: str) -> Slot:
        """Return the slot of "input", "weight" or "gradient"."""
        return self.scales[0].slot(self.places[name])

    @torch.no_grad()
    def refresh(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantize the weight again, in place: a CUDA graph may have recorded the address of its copies."""
        if not hasattr(self, "w8") or self.w8.device != weight.device:
            dtype, (n, k) = self.slot("weight").dtype, weight.shape
            w8, w8t = (torch.empty(shape, dtype=dtype, device=weight.device) for shape in ((n, k), (k, n)))
            own_bias = None if bias is None else torch.empty_like(bias, dtype=torch.bfloat16)
            self.w8, self.w8t, self.bias = w8, w8t, own_bias  # all or none: memory may run out between them
        cast_transpose(weight, self.slot("weight"), out=(self.w8, self.w8t))
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)

    def forward(self, x8: Tensor, add: Tensor | None = None) -> Tensor:
        """Compute x W^T + b [+ add [M, N]] from x8 [M, K]: bfloat16 [M, N]."""
        out = torch.empty(x8.shape[0], self.w8.shape[0], dtype=torch.bfloat16, device=x8.device)
        scales = self.slot("input").scale_inv, self.slot("weight").scale_inv
        return matmul(x8, self.w8, out, *scales, bias=self.bias, add=add, fast_accumulate=True)

    def input_gradient(self, g8: Tensor) -> Tensor:
        """Compute the gradient of x, bfloat16 [M, K], from g8 [M, N], the gradient of `forward`'s result."""
        out = torch.empty(g8.shape[0], self.w8t.shape[0], dtype=torch.bfloat16, device=g8.device)
        scales = self.slot("gradient").scale_inv, self.slot("weight").scale_inv
        return matmul(g8, self.w8t, out, *scales, fast_accumulate=self.scales[0].settings.fast_accumulation)

    def operands(self, x8: Tensor) -> Operands:
        """Return the operands of `forward`'s GEMM, for a kernel that does more."""
        return Operands(x8, self.w8, self.slot("input").scale_inv, self.slot("weight").scale_inv)

    def gradient_operands(self, g8: Tensor) -> Operands:
        """Return the operands of `input_gradient`'s GEMM, for a kernel that does more."""
        return Operands(g8, self.w8t, self.slot("gradient").scale_inv, self.slot("weight").scale_inv)

    def add_weight_gradient(
        self, weight: nn.Parameter, g8t: Tensor, x8t: Tensor, as_is: Literal["gradient", "input"] | None = None
    ) -> None:
        """Add the weight's gradient to `weight.grad`, float32 [N, K], inside the GEMM.

        g8t: [N, M]; x8t: [K, M]. `as_is`: that one of them is not transposed, but [M, N] or [M, K]. Autograd is given
        None for this weight.
        """
        of_gradient, of_input = self.slot("gradient").scale_inv, self.slot("input").scale_inv
        add = weight.grad
        out = torch.empty_like(weight) if add is None else add
        if as_is == "gradient":
            weight_gradient(g8t, x8t, out, of_gradient, of_input, add=add)
        elif as_is == "input":
            weight_gradient(x8t, g8t, out, of_input, of_gradient, transposed=True, add=add)
        else:
            matmul(g8t, x8t, out, of_gradient, of_input, add=add)
        weight.grad = out


def add_vector_gradient(parameter: nn.Parameter | None, partial: Tensor) -> None:
    """Sum partial column sums [P, N] into the `.grad` of a vector [N], as `FP8Linear.add_weight_gradient`."""
    if parameter is None:
        return
    add = parameter.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    reduce_columns(partial, parameter.grad, add)


def mlp_forward(
    kind: Kind, fc1: FP8Linear, fc2: FP8Linear, x8: Tensor, again: bool = False
) -> tuple[Tensor | None, Tensor | Activated]:
    """Compute the activation z in FP8 [M, f] of h = fc1(x8), and what `mlp_backward` needs of it.

    x8: [M, d]. `again`: only the latter is computed, with the same bits; the first result is None or unused.
    """
    slot = fc2.slot("input")
    if fits(x8, fc1.w8):
        activated = product_activation(kind, fc1.operands(x8), fc1.bias, slot)
        return activated.q, activated
    h = fc1.forward(x8)
    return None if again else activation_cast(kind, h, slot), h


def mlp_backward(
    kind: Kind, fc1: FP8Linear, fc2: FP8Linear, mlp: LayerNormMLP, gradient: tuple[Tensor, Tensor],
    kept: Tensor | Activated, x8t: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the gradient of fc1's input, bfloat16 [M, d].

    gradient: that of fc2's result in FP8, [M, d] and [d, M]. kept: of `mlp_forward`. x8t: [d, M]. The gradients of
    both weights and of fc1's bias are added to their `.grad`.
    """
    g8, g8t = gradient
    slot, of_z = fc1.slot("gradient"), fc2.slot("input")
    if isinstance(kept, Activated):
        operands = fc2.gradient_operands(g8)
        q, sums = product_activation_backward(kind, operands, kept.slopes, of_z.scale_inv, slot)
        fc2.add_weight_gradient(mlp.fc2_weight, g8t, kept.q, as_is="input")
        fc1.add_weight_gradient(mlp.fc1_weight, q, x8t, as_is="gradient")
    else:
        q, qt, zt, sums = activation_backward_cast(kind, fc2.input_gradient(g8), kept, slot, of_z)
        fc2.add_weight_gradient(mlp.fc2_weight, g8t, zt)
        fc1.add_weight_gradient(mlp.fc1_weight, qt, x8t)
    add_vector_gradient(mlp.fc1_bias, sums)
    return fc1.input_gradient(q)
