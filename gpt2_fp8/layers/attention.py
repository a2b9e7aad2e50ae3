"""Causal attention for the fused layers. By default: cuDNN's forward, FlashAttention 4's backward where installed.

Measured on an H200 with 64 sequences of 1,024 tokens and 12 heads of 64. Forward: cuDNN 0.30 ms, FlashAttention 0.38
ms. Backward: FlashAttention 0.79 ms, cuDNN 1.02 ms; FlashAttention also writes the packed gradient, so nothing is
copied. They may be mixed because both store the same log-sum-exp (natural logarithm) for each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2_fp8.compat.flash_attn import flash_backward, why_no_flash
from gpt2_fp8.compat.torch_private import cudnn_attention
from gpt2_fp8.config.block_spec import Heads, cudnn_takes
from gpt2_fp8.config.schema import AttentionKernel
from gpt2_fp8.layers import reference, te

HEAD_SIZES = (64, 128)  # where FlashAttention 4 was measured to be faster, and is tested
SHORT_TOKENS = 128  # one block of its backward; shorter sequences take other kernels of it, not measured


def kernels(heads: Heads) -> str:
    """Name the kernels that `attention` runs if it may choose, for people; not of sequences that `has_torchs`."""
    if not why_not_flash(heads):
        return "cuDNN forward, FlashAttention 4 backward"
    return "cuDNN" if cudnn_takes(heads.size) else "Transformer Engine's choice, not cuDNN"


def has_torchs(heads: Heads, tokens: int) -> bool:
    """Return whether torch chooses the kernel for sequences of `tokens` in what `attention` builds if it may choose."""
    return tokens <= SHORT_TOKENS and not why_not_flash(heads)


def why_not_flash(heads: Heads, tokens: int | None = None) -> str | None:
    """Return why FlashAttention 4 does not compute `attention`'s backward; None if it does.

    `tokens`: of a sequence. Without them, only the heads are asked about.
    """
    if tokens is not None and tokens <= SHORT_TOKENS:
        return f"sequences of {tokens} tokens, and FlashAttention 4 is for more than {SHORT_TOKENS}"
    return why_no_flash() if heads.size in HEAD_SIZES else f"heads of {heads.size}"


def attention(heads: Heads, kernel: AttentionKernel = "auto") -> nn.Module:
    """Build causal attention over packed queries, keys and values, bfloat16.

    It computes the same as `te.attention` without dropout. `kernel="flash"` is FlashAttention 4's backward with cuDNN's
    forward, which "auto" takes where it can; "sdpa", "math" and "cudnn" are torch's.
    """
    if kernel in ("sdpa", "math", "cudnn"):
        return reference.attention(heads, dropout=0.0, kernel=kernel)
    if kernel == "te" or (kernel == "auto" and why_not_flash(heads)):
        return te.attention(heads, dropout=0.0)
    return FlashAttention(heads)


class FlashAttention(nn.Module):
    """Causal attention: cuDNN's forward and FlashAttention 4's backward.

    qkv: [batch, tokens, heads.packed] as in `reference.Attention`; returns [batch, tokens, heads.queries].
    """

    def __init__(self, heads: Heads):
        super().__init__()
        self.n_head = heads.n_head

    def forward(self, qkv: Tensor) -> Tensor:
        """Compute attention; sequences of at most `SHORT_TOKENS` tokens go to torch's own kernels."""
        if qkv.shape[1] <= SHORT_TOKENS:
            return reference.causal_attention(qkv, self.n_head)
        return _FlashAttention.apply(qkv, self.n_head)


def _split(packed: Tensor, n_head: int) -> tuple[Tensor, ...]:
    """Split [batch, tokens, heads.packed] into three views [batch, tokens, n_head, head size]."""
    batch, tokens, _ = packed.shape
    return packed.view(batch, tokens, 3, n_head, -1).unbind(2)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, n_head: int) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in _split(packed, n_head))
        out, lse = cudnn_attention(q, k, v)
        out = out.transpose(1, 2).contiguous()  # no copy: cuDNN's result has the strides of q
        ctx.n_head = n_head
        ctx.save_for_backward(packed, out, lse)
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        packed, out, lse = ctx.saved_tensors
        gradient = torch.empty_like(packed)
        q, k, v = _split(packed, ctx.n_head)
        dq, dk, dv = _split(gradient, ctx.n_head)
        dout, lse = upstream[0].reshape(out.shape), lse.view(lse.shape[:3])
        deterministic = torch.are_deterministic_algorithms_enabled()
        backward = flash_backward()
        assert backward is not None
        backward(q, k, v, out, dout, lse, causal=True, deterministic=deterministic, dq=dq, dk=dk, dv=dv)
        return gradient, None
