"""Causal attention for the fused layers: cuDNN's forward, and FlashAttention 4's backward where it is installed.

On an H200 at heads of 64 and 1,024 tokens, cuDNN's forward is the faster one (0.30 against 0.38 ms for 64 sequences of
12 heads) and FlashAttention's backward is (0.79 against 1.02 ms; it also writes the packed gradient, so nothing is
copied). They fit together: both say of each row the natural logarithm of its sum of exponentials.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2_fp8.compat.flash_attn import flash_backward, why_no_flash
from gpt2_fp8.compat.torch_private import cudnn_attention
from gpt2_fp8.config.block_spec import Heads
from gpt2_fp8.layers import reference, te

HEAD_SIZES = (64, 128)  # where it was measured to be faster, and is tested
SHORT = 128  # tokens of one block of its backward; up to here it has other kernels, which were not measured


def kernels(heads: Heads) -> str:
    """Say what `attention` will run, for people."""
    return "cuDNN" if why_not_flash(heads) else "cuDNN forward, FlashAttention 4 backward"


def why_not_flash(heads: Heads) -> str | None:
    """Say why it is not FlashAttention 4 that computes `attention`'s backward, or None."""
    return why_no_flash() if heads.size in HEAD_SIZES else f"heads of {heads.size}"


def attention(heads: Heads) -> nn.Module:
    """Build causal attention over packed queries, keys and values, bfloat16; as `te.attention` without dropout."""
    return te.attention(heads, dropout=0.0) if why_not_flash(heads) else FlashAttention(heads)


class FlashAttention(nn.Module):
    """qkv: [batch, tokens, heads.packed] as in `reference.Attention`; returns [batch, tokens, heads.queries]."""

    def __init__(self, heads: Heads):
        super().__init__()
        self.n_head = heads.n_head

    def forward(self, qkv: Tensor) -> Tensor:
        if qkv.shape[1] <= SHORT:
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
        out = out.transpose(1, 2).contiguous()  # it lies so already: cuDNN's result has the strides of q
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
