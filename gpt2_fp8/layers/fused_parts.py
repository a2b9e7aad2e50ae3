"""The parts of a fused block: its linear layers, and what its forward leaves for its backward.

M = batch * tokens rows, d = n_embd, f = hidden channels of the MLP.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpt2_fp8.kernels.layer_norm import Statistics
from gpt2_fp8.kernels.product_gelu import Activated
from gpt2_fp8.layers.fp8_linear import FP8Linear


class FP8Linears(NamedTuple):
    """The four linear layers of a block."""

    qkv: FP8Linear
    projection: FP8Linear
    fc1: FP8Linear
    fc2: FP8Linear


class Attended(NamedTuple):
    """What a block's backward needs of its first half."""

    middle: Tensor  # the residual stream after attention: bfloat16 [M, d]
    packed: Tensor  # attention's input [batch, tokens, heads.packed] and its result, with autograd's graph between them
    attended: Tensor
    y8t: Tensor  # the transposed inputs of the two GEMMs, FP8 [d, M]
    o8t: Tensor
    statistics: Statistics  # of the normalisation before them


class Hidden(NamedTuple):
    """What a block's backward needs of its MLP's hidden layer."""

    gelu: Tensor | Activated  # see `fp8_gelu`
    y8t: Tensor  # the transposed input of its GEMM, FP8 [d, M]
    statistics: Statistics  # of the normalisation before it
