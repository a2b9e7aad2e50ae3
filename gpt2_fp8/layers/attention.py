"""Causal attention for the fused layers. By default: cuDNN's forward, FlashAttention 4's backward where installed.

Measured on an H200 with 64 sequences of 1,024 tokens and 12 heads of 64. Forward: cuDNN 0.30 ms, FlashAttention 0.38
ms. Backward: FlashAttention 0.79 ms, cuDNN 1.02 ms; FlashAttention also writes the packed gradient, so nothing is
copied. They may be mixed because both store the same log-sum-exp (natural logarithm) for each row.

QK-norm and RoPE are one kernel before it, and one after its backward (`kernels.rotary`).
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


def attention(heads: Heads, kernel: AttentionKernel = "auto", epsilon: float = 1e-5) -> nn.Module:
    """Build causal attention over packed queries, keys and values, bfloat16.

    It computes the same as `te.attention` without dropout, with `Turns` in the angles' place. `kernel="flash"` is
    FlashAttention 4's backward with cuDNN's forward, which "auto" takes where it can; "sdpa", "math" and "cudnn" are
    torch's. `epsilon`: of QK-norm.
    """
    if kernel in ("sdpa", "math", "cudnn"):
        return Attention(heads, 0.0, epsilon, kernel)
    if kernel == "te" or (kernel == "auto" and why_not_flash(heads)):
        return TEAttention(heads, 0.0, epsilon)
    return FlashAttention(heads, 0.0, epsilon)


class Attention(reference.Attention):
    """Causal attention whose queries and keys one kernel prepares, with torch's kernels. `angle` of a call: `Turns`."""

    packs = False  # whether that kernel copies values beside them

    def prepare(self, qkv: Tensor, angle: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.Attention`."""
        norms = () if self.q_norm is None else (self.q_norm, self.k_norm)
        if angle is None and not norms:
            return super().prepare(qkv, None)
        return _Prepare.apply(qkv, self.heads, angle, self.epsilon, self.packs, *norms)


class TEAttention(Attention, te.Attention):
    """The same with the kernel that Transformer Engine chooses.

    TE takes queries, keys and values that lie side by side as they are, and gives gradients that do. Of others it
    copies every one that is not contiguous, and gives gradients apart (its `get_qkv_layout`).
    """

    packs = True


class FlashAttention(Attention):
    """The same with cuDNN's forward and FlashAttention 4's backward.

    qkv: [batch, tokens, heads.packed] as in `reference.Attention`; returns [batch, tokens, heads.queries]. Sequences of
    at most `SHORT_TOKENS` tokens go to torch's own kernels.
    """

    def forward(self, qkv: Tensor, angle: Any = None, mask: Tensor | None = None) -> Tensor:
        """Compute attention."""
        if qkv.shape[1] <= SHORT_TOKENS and angle is None and self.q_norm is None:
            return reference.causal_attention(qkv, self.heads.n_head)
        return super().forward(qkv, angle, mask)

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """See `reference.Attention`. Its backward does not copy."""
        return _Prepare.apply(qkv, self.heads, None, self.epsilon, self.packs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """See `reference.Attention`; without a mask."""
        assert mask is None
        if q.shape[1] <= SHORT_TOKENS:
            return super().attend(q, k, v, None)
        return _FlashAttention.apply(q, k, v)


class _Prepare(torch.autograd.Function):
    """Queries, keys and values from the packed ones: with neither RoPE nor QK-norm, their `split_heads`.

    Its backward returns one packed gradient: that of which attention's backward gives the parts, if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, heads: Heads, turns: Any, epsilon: float, packs: bool, *norms: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.given, ctx.heads, ctx.prepares = (turns, epsilon), heads, turns is not None or bool(norms)
        ctx.save_for_backward(packed, *norms)
        parts = reference.split_heads(packed, heads)
        if not ctx.prepares:
            return parts
        from gpt2_fp8.kernels.rotary import prepare_heads  # imports Triton

        prepared = prepare_heads(packed, heads.n_head, heads.n_kv_head, turns, norms, epsilon, packs)
        return *prepared, *parts[len(prepared) :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (packed, *norms), (turns, epsilon) = ctx.saved_tensors, ctx.given
        gradient = _whole(packed, ctx.heads, upstream)
        if gradient is None:
            assert ctx.prepares, "FlashAttention 4's gradients are parts of one"
            gradient = torch.empty_like(packed)
            _, _, dv = reference.split_heads(gradient, ctx.heads)  # the kernel writes the other two
            dv.copy_(upstream[2])
        of_norms = torch.empty(len(norms), ctx.heads.size, dtype=torch.float32, device=packed.device)
        if ctx.prepares:
            from gpt2_fp8.kernels.cast import reduce_columns
            from gpt2_fp8.kernels.rotary import prepare_heads_backward

            dq, dk, _ = upstream
            sums = prepare_heads_backward(dq, dk, packed, gradient, turns, tuple(norms), epsilon)
            if norms:
                reduce_columns(sums.flatten(1), of_norms.view(-1), add=False)
        return gradient, None, None, None, None, *of_norms


def _whole(packed: Tensor, heads: Heads, parts: tuple[Tensor, ...]) -> Tensor | None:
    """Return the tensor like `packed` whose `split_heads` are these parts, in memory; None if they are not one's."""
    start = parts[0].storage_offset() - packed.storage_offset()
    memory = parts[0].untyped_storage().data_ptr()
    for part, like in zip(parts, reference.split_heads(packed, heads), strict=True):
        place = part.untyped_storage().data_ptr(), part.stride(), part.storage_offset()
        if place != (memory, like.stride(), like.storage_offset() + start):
            return None
    return parts[0].as_strided(packed.shape, packed.stride())


class _FlashAttention(torch.autograd.Function):
    """Attention over [batch, tokens, heads, size], to [batch, tokens, heads * size]. Its gradients lie packed."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in inputs)
        out, lse = cudnn_attention(q, k, v)
        out = out.transpose(1, 2).contiguous()  # no copy: cuDNN's result has the strides of q
        ctx.save_for_backward(*inputs, out, lse)
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = (tensor.detach() for tensor in ctx.saved_tensors)
        batch, tokens, n_head, size = q.shape
        dq, dk, dv = q.new_empty(batch, tokens, 3, n_head, size).unbind(2)
        dout, lse = upstream[0].reshape(out.shape), lse.view(lse.shape[:3])
        deterministic = torch.are_deterministic_algorithms_enabled()
        backward = flash_backward()
        assert backward is not None
        backward(q, k, v, out, dout, lse, causal=True, deterministic=deterministic, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv
