"""The gradients of the fused head's input and parameters, accumulated chunk by chunk.

M = batch * tokens rows, d = n_embd, N = padded_vocab_size; m rows of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels.cast import reduce_columns
from gpt2_fp8.kernels.embedding import embedding_gradient
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.layer_norm import Statistics, layer_norm_backward
from gpt2_fp8.kernels.probability_grid import GRADIENT
from gpt2_fp8.kernels.rounding import mean_of_rounded
from gpt2_fp8.layers.head_layer import HeadLayer


class Share(NamedTuple):
    """What a chunk of rows has for the gradients."""

    dy: Tensor  # of its normalised rows, bfloat16 [m, d]
    g8t: Tensor  # of its logits, E5M2 [N, m], but for what it lacks at targets
    scale_inv: Tensor  # of that, float32 of one element
    y8t: Tensor  # its normalised rows, times what g8t is off by, FP8 [d, m]
    targets: Tensor  # int64 [m]
    at_targets: Tensor  # what its rows add to the weight's gradient of their targets, bfloat16 [m, d]


class HeadGradients:
    """The gradients of the input [M, d], of the weight [N, d], and of the normalisation's two vectors.

    `weight`: what the loss of a row counts, float32 of one element.
    """

    def __init__(self, head: HeadLayer, x: Tensor, weight: Tensor, z_loss: float):
        self.head, self.z_loss, self.begun = head, z_loss, False
        self.loss_weight = weight.reshape(1)
        self.dx = torch.empty_like(x)
        self.weight = torch.empty_like(head.weight)
        self.norm = torch.empty(2, x.shape[1], dtype=torch.float32, device=x.device)

    def scale_inv(self, factor: float) -> Tensor:
        """Return the inverse scale of a softmax in E5M2 that was multiplied by `factor`, float32 of one element."""
        return self.loss_weight / (factor * mean_of_rounded(GRADIENT))

    def add(self, share: Share, x: Tensor, statistics: Statistics) -> Tensor:
        """Add a chunk's share to the parameters' gradients; return the gradient of its input x [m, d]."""
        weight, input_scale = self.weight, self.head.linear.slot("input").scale_inv
        matmul(share.g8t, share.y8t, weight, share.scale_inv, input_scale, add=weight if self.begun else None)
        embedding_gradient(share.at_targets[None], share.targets.clamp_min(0)[None], weight)
        result = layer_norm_backward(share.dy, x, statistics, self.head.layer_norm_weight, None, None)
        for i in range(2):
            reduce_columns(result.sums[:, i], self.norm[i], add=self.begun)
        self.begun = True
        return result.dx
