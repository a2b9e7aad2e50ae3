"""Causal attention for the fused layers: cuDNN's forward, and FlashAttention 4's backward where it is installed.

On an H200 at heads of 64 and 1,024 tokens, cuDNN's forward is the faster one (0.30 against 0.38 ms for 64 sequences of
12 heads) and FlashAttention's backward is (0.79 against 1.02 ms; it also writes the packed gradient, so nothing is
copied). They fit together: both say of each row the natural logarithm of its sum of exponentials.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.layers import te

HEAD_SIZES = (64, 128)  # what was measured to be faster, and is tested


@cache
def has_flash_attention_4() -> bool:
    """Whether FlashAttention 4 (the package `flash-attn-4`) is installed."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # no package flash_attn at all
        return False


def attention(n_head: int, n_embd: int) -> nn.Module:
    """Causal attention over packed queries, keys and values, bfloat16; as `te.attention` without dropout."""
    if has_flash_attention_4() and n_embd // n_head in HEAD_SIZES:
        return FlashAttention(n_head)
    return te.attention(n_head, n_embd, dropout=0.0)


class FlashAttention(nn.Module):
    """qkv: [batch, tokens, 3 * n_embd] as in `reference.Attention`; returns [batch, tokens, n_embd]."""

    def __init__(self, n_head: int):
        super().__init__()
        self.n_head = n_head

    def forward(self, qkv: Tensor) -> Tensor:
        return _FlashAttention.apply(qkv, self.n_head)


def _split(packed: Tensor, n_head: int) -> tuple[Tensor, ...]:
    """[batch, tokens, 3 * n_embd] -> three views [batch, tokens, n_head, head size]."""
    batch, tokens, _ = packed.shape
    return packed.view(batch, tokens, 3, n_head, -1).unbind(2)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, n_head: int) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in _split(packed, n_head))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=True
        )
        out = out.transpose(1, 2).contiguous()  # it lies so already: cuDNN's result has the strides of q
        ctx.n_head = n_head
        ctx.save_for_backward(packed, out, lse)
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        from flash_attn.cute.interface import _flash_attn_bwd

        packed, out, lse = ctx.saved_tensors
        gradient = torch.empty_like(packed)
        q, k, v = _split(packed, ctx.n_head)
        dq, dk, dv = _split(gradient, ctx.n_head)
        dout, lse = upstream[0].reshape(out.shape), lse.view(lse.shape[:3])
        deterministic = torch.are_deterministic_algorithms_enabled()
        _flash_attn_bwd(q, k, v, out, dout, lse, causal=True, deterministic=deterministic, dq=dq, dk=dk, dv=dv)
        return gradient, None
