"""The decoder's blocks and head, in five families of layers.

All families have the same parameter names, shapes and initial values, so a state dict moves between them unchanged:

- `reference`: plain torch, for a CPU and for bf16 under `torch.compile`;
- `te`: Transformer Engine's modules, for every FP8 recipe;
- `fused`: FP8 GEMMs chained by our own kernels, for delayed scaling on Hopper. It is the fastest there.
- the layers of `reference` with torchao's FP8 products (`block.WithProducts`), where Transformer Engine is not;
- `emulated`: the layers of `reference` with the blocks' FP8 operands emulated, on any device; not for speed.

`reference` and `te` offer the same layers. `block.Composed` builds blocks and heads from them:

- `layer_norm_linear(in_features, out_features, norm, bias, fp8)`: `layer_norm_*, weight[, bias]`
- `linear(in_features, out_features, bias, fp8)`: `weight[, bias]`
- `layer_norm_mlp(n_embd, mlp, norm, bias, fp8, recompute)`: `layer_norm_*, fc1_weight[, fc1_bias], fc2_weight[, ...]`
- `head(n_embd, padded_vocab_size, norm, fp8)`: a `layer_norm_linear` without bias. Its FP8 gradient is always E5M2.
- `again(part, *inputs, draws)`: `part(*inputs)`, which is computed once more in its backward
- `attention(heads, dropout, epsilon, kernel)`: causal attention over packed queries, keys and values. It is called as
  `attention(qkv, angle, mask)`, with RoPE's angles or None. QK-norm alone has parameters: `[q_norm, k_norm]`

`norm`, `mlp` and `heads` are parts of a `block_spec.BlockSpec`. RMSNorm has no `layer_norm_bias`. The first half of
SwiGLU's `fc1_weight` is the gate, as Transformer Engine has it. Parameters are uninitialised: `model.gpt2.initialise`
fills them.
"""
