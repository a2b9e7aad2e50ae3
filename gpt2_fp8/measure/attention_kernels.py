"""The kernels of attention that are measured, each called in the cheapest way that it offers.

Each takes one packed tensor [batch, tokens, heads.packed]: queries, then keys, then values. Its builder, or a call,
raises `Unavailable` where the kernel is not installed or does not take the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2_fp8.config.block_spec import Heads
from gpt2_fp8.layers import reference, te
from gpt2_fp8.measure.timing import Unavailable, installed


class Shape(NamedTuple):
    """The sizes of one attention."""

    batch: int
    tokens: int
    n_head: int
    head_size: int
    n_kv_head: int | None = None  # None: as many as n_head

    @property
    def heads(self) -> Heads:
        """The heads, as a layer takes them. RoPE and QK-norm are no part of what is measured."""
        return Heads(self.n_head, self.n_kv_head or self.n_head, self.head_size)


Attend = Callable[[Tensor], Tensor]  # packed [batch, tokens, heads.packed] -> [batch, tokens, heads.queries]
Build = Callable[[Shape, str], Attend]  # for a type of device


def materialised(shape: Shape, device: str) -> Attend:
    """Build attention with a matrix of scores in memory, as before there were fused kernels."""
    masked = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=device).triu(1)

    def attend(packed: Tensor) -> Tensor:
        parts = packed.split([shape.heads.queries, shape.heads.keys, shape.heads.keys], dim=2)
        q, k, v = (part.unflatten(2, (-1, shape.head_size)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(shape.n_head // shape.heads.n_kv_head, dim=1) for part in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(shape.head_size)
        return (scores.masked_fill(masked, -math.inf).softmax(dim=3) @ v).transpose(1, 2).flatten(2)

    return attend


def _standard(shape: Shape, device: str) -> Attend:
    if device == "cuda":
        # bytes of the matrices that live at the same time in backward
        needed = 5 * 2 * shape.batch * shape.n_head * shape.tokens**2
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            text = f"its matrices need about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
            raise Unavailable("skipped", text)
    return materialised(shape, device)


def _sdpa(backend: str) -> Build:
    """Return the builder of the model's own plain-torch layer, limited to one of torch's kernels."""

    def build(shape: Shape, device: str) -> Attend:
        if not hasattr(SDPBackend, backend):
            raise Unavailable("refused", f"torch {torch.__version__} does not know it")
        layer, chosen = reference.Attention(shape.heads, dropout=0.0), getattr(SDPBackend, backend)

        def attend(packed: Tensor) -> Tensor:
            try:
                with sdpa_kernel(chosen):
                    return layer(packed)
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise Unavailable("refused", "torch has no such kernel for this device and shape") from error
                raise

        return attend

    return build


def _transformer_engine(shape: Shape, device: str) -> Attend:
    """Build the model's own layer: layout bshd, split by SplitAlongDim, whose backward does not copy."""
    installed("transformer_engine.pytorch")
    return te.attention(shape.heads, dropout=0.0)


def _flash_2(shape: Shape, device: str) -> Attend:
    return _packed(installed("flash_attn.flash_attn_interface").flash_attn_qkvpacked_func, shape)


def _flash_3(shape: Shape, device: str) -> Attend:
    return _packed(installed("flash_attn_interface").flash_attn_qkvpacked_func, shape)


def _flash_4(shape: Shape, device: str) -> Attend:
    """Build FlashAttention 4. It takes queries, keys and values separately; one copy joins their gradients."""
    kernel = installed("flash_attn.cute").flash_attn_func
    return _packed(lambda packed, causal: kernel(*packed.unbind(2), causal=causal), shape)


def _packed(kernel: Callable[..., Tensor | tuple[Tensor, ...]], shape: Shape) -> Attend:
    """Build attention from a kernel over [batch, tokens, 3, n_head, head_size].

    Some versions of the kernel also return the softmax's sums.
    """
    if shape.heads.n_kv_head != shape.n_head:
        raise Unavailable("refused", "called with packed tensors, it has as many key-value heads as heads")

    def attend(packed: Tensor) -> Tensor:
        y = kernel(packed.unflatten(2, (3, shape.n_head, shape.head_size)), causal=True)
        return (y[0] if isinstance(y, tuple) else y).flatten(2)

    return attend


# The builder of each, and the distributions that tell its version. Kernels that compile themselves come last.
KERNELS: dict[str, tuple] = {
    "standard": (_standard, "torch"),
    "SDPA FLASH_ATTENTION": (_sdpa("FLASH_ATTENTION"), "torch"),
    "SDPA EFFICIENT_ATTENTION": (_sdpa("EFFICIENT_ATTENTION"), "torch"),
    "SDPA CUDNN_ATTENTION": (_sdpa("CUDNN_ATTENTION"), "torch"),
    "Transformer Engine": (_transformer_engine, "transformer_engine", "transformer-engine"),
    "FlashAttention 2": (_flash_2, "flash-attn"),
    "FlashAttention 3": (_flash_3, "flash-attn-3", "flash_attn_3"),
    "FlashAttention 4": (_flash_4, "flash-attn-4"),
}
