"""GELU between the MLP's two FP8 layers, and the backward through it and through their weights.

Where it fits, GELU and its derivative are inside the GEMMs (`kernels.product_gelu`). Then its input h is not stored.
The backward keeps gelu(h) in FP8 and its derivative's codes, as many bytes. Nothing of the hidden layer is transposed:
its weight gradients take one operand as it is (`kernels.weight_gradient`).

Elsewhere a kernel of its own follows cuBLASLt's GEMMs (`kernels.gelu`). Then h is kept, in bfloat16.

Shapes: M = batch * tokens rows, d = n_embd, f = hidden channels. `fc1` and `fc2` are the two layers.
"""

from __future__ import annotations

from torch import Tensor

from gpt2_fp8.kernels.gelu import gelu_backward_cast, gelu_cast
from gpt2_fp8.kernels.product_gelu import Activated, fits, product_gelu, product_gelu_backward
from gpt2_fp8.layers.fp8_linear import FP8Linear, add_vector_gradient
from gpt2_fp8.layers.reference import LayerNormMLP


def forward(
    fc1: FP8Linear, fc2: FP8Linear, x8: Tensor, again: bool = False
) -> tuple[Tensor | None, Tensor | Activated]:
    """Compute gelu(h) in FP8 [M, f] for h = fc1(x8), and what `backward` needs of it.

    x8: [M, d]. `again`: only the latter is computed, with the same bits; the first result is None or unused.
    """
    slot = fc2.slot("input")
    if fits(x8, fc1.w8):
        activated = product_gelu(fc1.operands(x8), fc1.bias, slot)
        return activated.q, activated
    h = fc1.forward(x8)
    return None if again else gelu_cast(h, slot), h


def backward(
    fc1: FP8Linear, fc2: FP8Linear, mlp: LayerNormMLP, gradient: tuple[Tensor, Tensor], kept: Tensor | Activated,
    x8t: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the gradient of fc1's input, bfloat16 [M, d].

    gradient: that of fc2's result in FP8, [M, d] and [d, M]. kept: of `forward`. x8t: [d, M]. The gradients of both
    weights and of fc1's bias are added to their `.grad`.
    """
    g8, g8t = gradient
    slot = fc1.slot("gradient")
    if isinstance(kept, Activated):
        q, sums = product_gelu_backward(fc2.gradient_operands(g8), kept.slopes, slot)
        fc2.add_weight_gradient(mlp.fc2_weight, g8t, kept.q, as_is="input")
        fc1.add_weight_gradient(mlp.fc1_weight, q, x8t, as_is="gradient")
    else:
        q, qt, yt, sums = gelu_backward_cast(fc2.input_gradient(g8), kept, slot, fc2.slot("input"))
        fc2.add_weight_gradient(mlp.fc2_weight, g8t, yt)
        fc1.add_weight_gradient(mlp.fc1_weight, qt, x8t)
    add_vector_gradient(mlp.fc1_bias, sums)
    return fc1.input_gradient(q)
