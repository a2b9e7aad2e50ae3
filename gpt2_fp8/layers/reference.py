"""The layers in plain torch: for a CPU, for bf16 under `torch.compile`, and to test the FP8 layers against."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt2_fp8.config.block_spec import MLP, Bands, Heads, Norm, RoPE
from gpt2_fp8.config.kept_layers import NO_PARTS, Part
from gpt2_fp8.config.schema import AttentionKernel
from gpt2_fp8.layers.sdpa import causal

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Compute LayerNorm over the last dimension; without a bias RMSNorm, in the weight's dtype.

    Under autocast weights that FSDP has gathered in bfloat16 are taken to float32, which others have.
    """
    if torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.float(), None if bias is None else bias.float()
    if bias is None:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def _norm_bias(width: int, norm: Norm) -> Any:
    """Create LayerNorm's bias; None for RMSNorm."""
    return _parameter(width) if norm.kind == "layer_norm" else None


class LayerNormLinear(nn.Module):
    """y = Norm(x) W^T + b. x: [..., in_features]; y: [..., out_features]. `fp8` has no effect in these layers.

    `product(x, weight, bias)` computes x W^T + b; a family may set another.
    """

    product: Product = staticmethod(F.linear)

    def __init__(self, in_features: int, out_features: int, norm: Norm, bias: bool, fp8: bool = False):
        super().__init__()
        self.epsilon = norm.epsilon
        self.layer_norm_weight = _parameter(in_features)
        self.layer_norm_bias = _norm_bias(in_features, norm)
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y. `is_first_microbatch` has no effect here."""
        x = normalise(x, self.layer_norm_weight, self.layer_norm_bias, self.epsilon)
        return self.product(x, self.weight, self.bias)


class Linear(nn.Module):
    """y = x W^T + b. x: [..., in_features]; y: [..., out_features]. `product`: see `LayerNormLinear`."""

    product: Product = staticmethod(F.linear)

    def __init__(self, in_features: int, out_features: int, bias: bool, fp8: bool = False):
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y. `is_first_microbatch` has no effect here."""
        return self.product(x, self.weight, self.bias)


class LayerNormMLP(nn.Module):
    """A normalisation, a linear to the hidden layer, its activation, and a linear back. x, y: [..., n_embd].

    The activation between them is `activate`'s.
    `fc1_product` and `fc2_product`: see `LayerNormLinear`.
    """

    fc1_product: Product = staticmethod(F.linear)
    fc2_product: Product = staticmethod(F.linear)

    def __init__(
        self, n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: Set[Part] = NO_PARTS, recompute: bool = False
    ):
        super().__init__()
        self.recompute, self.epsilon, self.kind = recompute, norm.epsilon, mlp.kind
        self.layer_norm_weight = _parameter(n_embd)
        self.layer_norm_bias = _norm_bias(n_embd, norm)
        self.fc1_weight = _parameter(mlp.projected, n_embd)
        self.fc1_bias = _parameter(mlp.projected) if bias else None
        self.fc2_weight = _parameter(n_embd, mlp.width)
        self.fc2_bias = _parameter(n_embd) if bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y. `is_first_microbatch` has no effect here."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = normalise(x, self.layer_norm_weight, self.layer_norm_bias, self.epsilon)
        x = activate(self.fc1_product(x, self.fc1_weight, self.fc1_bias), self.kind)
        return self.fc2_product(x, self.fc2_weight, self.fc2_bias)


def activate(h: Tensor, kind: str) -> Tensor:
    """Compute an MLP's activation of its hidden layer, [..., projected] to [..., width]. `kind`: `MLP.kind`.

    GELU is in its tanh form, as GPT-2's. SwiGLU is SiLU of the first half, times the second. Squared ReLU is
    max(h, 0)^2 (So et al. 2021, arXiv 2109.08668).
    """
    if kind == "swiglu":
        gate, h = h.chunk(2, dim=-1)
        return F.silu(gate) * h
    return F.relu(h).square() if kind == "relu_squared" else F.gelu(h, approximate="tanh")


def angles(rope: RoPE, size: int, tokens: int, device: torch.device) -> Tensor:
    """Compute by how much positions 0 to `tokens` - 1 turn the channel pairs of a head (RoPE, Su et al. 2021).

    A pair is channel i of a head's first half and channel i of its second, of `size` in all, as in GPT-NeoX and in
    Hugging Face's weights. Meta's own Llama files pair neighbours instead: the same model, with the rows of its
    projections in another order.

    Returns radians from 0 to 2 pi, float64 [tokens, size / 2]. Float32 would be wrong by 5e-4 at position 8,192.
    """
    pair = torch.arange(size // 2, device=device, dtype=torch.float64)
    frequency = rope.base ** (-pair / (size / 2.0))  # radians a token
    kept = 0.0 if rope.bands is None else _unscaled_share(frequency, rope.bands)
    frequency = frequency * (kept + (1.0 - kept) / rope.scaling)
    position = torch.arange(tokens, device=device, dtype=torch.float64)
    return (position[:, None] * frequency).remainder(math.tau)


def _unscaled_share(frequency: Tensor, bands: Bands) -> Tensor:
    """Compute which part of each frequency is not scaled, from 0 to 1."""
    turns = bands.original_positions * frequency / math.tau
    return ((turns - bands.low) / (bands.high - bands.low)).clamp(0.0, 1.0)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn the pairs of `x`, [batch, tokens, heads, size], by `angle`, [tokens, size / 2]. Computes in x's dtype."""
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_heads(packed: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """Split [batch, tokens, heads.packed] into views [batch, tokens, heads of each, size]: queries, keys, values."""
    return packed.unflatten(2, (-1, heads.size)).split([heads.n_head, heads.n_kv_head, heads.n_kv_head], dim=2)


class Attention(nn.Module):
    """Causal attention, with what is done to queries and keys before it.

    qkv: [batch, tokens, heads.packed]: queries, then keys, then values, and within each head after head. Returns
    [batch, tokens, heads.queries]. `epsilon`: of QK-norm. `kernel`: see `sdpa.causal`.
    """

    def __init__(self, heads: Heads, dropout: float, epsilon: float = 1e-5, kernel: AttentionKernel = "auto"):
        super().__init__()
        self.heads, self.dropout, self.epsilon, self.choice = heads, dropout, epsilon, kernel
        self.q_norm = _parameter(heads.size) if heads.qk_norm else None
        self.k_norm = _parameter(heads.size) if heads.qk_norm else None

    def forward(self, qkv: Tensor, angle: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Compute attention. `angle`: how far RoPE turns each position (`angles`); None: there is no RoPE.

        `mask`: see `sdpa.causal`.
        """
        return self.attend(*self.prepare(qkv, angle), mask)

    def prepare(self, qkv: Tensor, angle: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values that attention sees: [batch, tokens, heads of each, size], one dtype."""
        q, k, v = self.split(qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (normalise(x, weight, None, self.epsilon) for x, weight in ((q, self.q_norm), (k, self.k_norm)))
        if angle is not None:
            q, k = self.rotate(q, angle), self.rotate(k, angle)
        return q.to(v.dtype), k.to(v.dtype), v

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Split into queries, keys and values: see `split_heads`."""
        return split_heads(qkv, self.heads)

    def rotate(self, x: Tensor, angle: Tensor) -> Tensor:
        """Turn queries or keys, in float32 or more."""
        return rotate(x.to(torch.promote_types(x.dtype, torch.float32)), angle)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention over what `split` returns, with dropout only in training."""
        return causal(q, k, v, self.dropout if self.training else 0.0, self.choice, mask)


def causal_attention(qkv: Tensor, n_head: int) -> Tensor:
    """Compute what `Attention` does without options: as many key-value heads as heads, and no dropout."""
    q, k, v = (part.unflatten(2, (n_head, -1)) for part in qkv.chunk(3, dim=2))
    return causal(q, k, v, 0.0)


def again(part: Callable[..., Tensor], *inputs: Any, draws: bool, **how: Any) -> Tensor:
    """Compute `part(*inputs)`. Its backward computes it once more: of what it computes, nothing is kept until then.

    `draws`: whether it draws random numbers, which are then drawn again. `how`: more arguments of torch's `checkpoint`.
    """
    if not torch.is_grad_enabled():
        return part(*inputs)
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=draws, **how)


def head(n_embd: int, padded_vocab_size: int, norm: Norm, fp8: bool) -> nn.Module:
    """Build what the package describes. `fp8` has no effect here."""
    return LayerNormLinear(n_embd, padded_vocab_size, norm, bias=False)


attention, linear, layer_norm_linear, layer_norm_mlp = Attention, Linear, LayerNormLinear, LayerNormMLP
