"""What the fused head is made of, whatever its loss: the last normalisation, the embedding, and its FP8 side."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.kernels.slot import Slot
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.fp8_linear import FP8Linear
from gpt2_fp8.layers.reference import LayerNormLinear


class HeadLayer(LayerNormLinear):
    """The last normalisation and the GEMM with the embedding. `linear` is its FP8 side, for training.

    Logits without gradients are computed in bfloat16: what is rounded to FP8 has a higher loss, and an evaluation gains
    nothing by it.
    """

    def __init__(self, spec: BlockSpec, padded_vocab_size: int, scales: Scales):
        super().__init__(spec.n_embd, padded_vocab_size, spec.norm, bias=False)
        self.linear = FP8Linear(scales, own_gradient=False)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute logits, bfloat16 [batch, tokens, padded_vocab_size], without gradients.

        x: bfloat16 [batch, tokens, d].
        """
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)

    def normalisation(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, float, Slot]:
        """Return what the kernels that normalise x [M, d] are called with."""
        return x, self.layer_norm_weight, self.layer_norm_bias, self.epsilon, self.linear.slot("input")
