"""The decoder's blocks and head in three families, with the same parameter names, shapes and initial values, so that a
state dict moves between them as it is:

- `reference`: plain torch, for a CPU and for bf16 under `torch.compile`;
- `te`: Transformer Engine's modules, for every FP8 recipe;
- `fused`: FP8 products chained by our own kernels, for delayed scaling on Hopper, and faster there.

`reference` and `te` offer the same five layers, of which `block.Composed` builds blocks and heads:

- `layer_norm_linear(in_features, out_features, norm, bias, fp8)`: `layer_norm_*, weight[, bias]`
- `linear(in_features, out_features, bias, fp8)`: `weight[, bias]`
- `layer_norm_mlp(n_embd, mlp, norm, bias, fp8, recompute)`: `layer_norm_*, fc1_weight[, fc1_bias], fc2_weight[, ...]`
- `head(n_embd, rows, norm, fp8)`: a `layer_norm_linear` without bias whose FP8 gradient is E5M2 whatever the blocks' is
- `attention(heads, dropout)`: causal attention over packed queries, keys and values; no parameters

`norm`, `mlp` and `heads` are parts of a `block_spec.BlockSpec`. `NAME` and `OFFERS` say which options of it they have.
Parameters are left for `model.initialise` to fill.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.layers.delayed_scaling import Scales


class Family(Protocol):
    """What a decoder is built of. `fp8=False` keeps a part's products in bf16 where the others' are FP8."""

    scales: Scales | None  # the state of the FP8 tensors where the family keeps it itself

    def embed(self, ids: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions to the residual stream: see `embedding.embed`."""
        ...

    def why_not(self, spec: BlockSpec) -> str | None:
        """Name the options of a block that these layers lack, for people; None if they can compute it."""
        ...

    def block(self, spec: BlockSpec, fp8: bool) -> nn.Module:
        """Called as `block(x, is_first_microbatch)`, x: [batch, tokens, n_embd]; returns the same shape."""
        ...

    def head(self, spec: BlockSpec, rows: int, fp8: bool) -> nn.Module:
        """Called as `head(x, is_first_microbatch)`; returns logits [batch, tokens, rows]. Its parameters are
        `layer_norm_weight`, `layer_norm_bias` and `weight`. It may offer `loss(...)`: see `head.Head`."""
        ...
