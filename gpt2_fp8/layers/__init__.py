"""The decoder's blocks and head, in five families of layers.

All families have the same parameter names, shapes and initial values, so a state dict moves between them unchanged:

- `reference`: plain torch, for a CPU and for bf16 under `torch.compile`;
- `te`: Transformer Engine's modules, for every FP8 recipe;
- `fused`: FP8 GEMMs chained by our own kernels, for delayed scaling on Hopper. It is the fastest there.
- `torchao`: the layers of `reference` with torchao's FP8 products, where Transformer Engine is not;
- `emulated`: the layers of `reference` with the blocks' FP8 operands emulated, on any device; not for speed.

`reference`, `te` and `torchao.Layers` offer the same layers. `block.Composed` builds blocks and heads from them:

- `layer_norm_linear(in_features, out_features, norm, bias, fp8)`: `layer_norm_*, weight[, bias]`
- `linear(in_features, out_features, bias, fp8)`: `weight[, bias]`
- `layer_norm_mlp(n_embd, mlp, norm, bias, fp8, recompute)`: `layer_norm_*, fc1_weight[, fc1_bias], fc2_weight[, ...]`
- `head(n_embd, padded_vocab_size, norm, fp8)`: a `layer_norm_linear` without bias. Its FP8 gradient is always E5M2.
- `again(part, *inputs, draws)`: `part(*inputs)`, which is computed once more in its backward
- `attention(heads, dropout, epsilon, kernel)`: causal attention over packed queries, keys and values. It is called as
  `attention(qkv, angle, mask)`, with RoPE's angles or None. QK-norm alone has parameters: `[q_norm, k_norm]`

`norm`, `mlp` and `heads` are parts of a `block_spec.BlockSpec`. `NAME` and `OFFERS` say which options of it they have.
RMSNorm has no `layer_norm_bias`. The first half of SwiGLU's `fc1_weight` is the gate, as Transformer Engine has it.
Parameters are uninitialised: `model.gpt2.initialise` fills them.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from torch import Tensor, nn

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.config.kept_layers import Part
from gpt2_fp8.layers.delayed_scaling import Scales


class Family(Protocol):
    """The layers that a decoder is built from. `fp8` says which GEMMs are in FP8; the others are in bf16."""

    scales: Scales | None  # the FP8 tensors' state, if the family keeps it itself

    def embed(self, ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Compute the start of the residual stream. See `block.embed`."""
        ...

    def why_not(self, spec: BlockSpec) -> str | None:
        """Name the options of a block that these layers lack, for people; None if they have all."""
        ...

    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        """Build one block, whose parts `fp8` are in FP8.

        It is called as `block(x, is_first_microbatch)`; with RoPE also with `reference.angles`.

        With `document_mask` it gets angles or None, and `sdpa.within_documents`.

        x: [batch, tokens, n_embd]. The block returns the same shape.
        """
        ...

    def head(self, spec: BlockSpec, padded_vocab_size: int, fp8: bool) -> nn.Module:
        """Build the head. It is called as `head(x, is_first_microbatch)`.

        It returns logits [batch, tokens, padded_vocab_size]. Its parameters are `layer_norm_weight`,
        `layer_norm_bias` (LayerNorm alone) and `weight`. It may offer `loss(...)`: see `head.Head`.
        """
        ...
