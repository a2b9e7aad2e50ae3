"""The layers in plain torch: for a CPU, for bf16 under `torch.compile`, and to test the FP8 layers against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt2_fp8.config.block_spec import GPT2_OPTIONS, MLP, Heads, Norm

NAME = "the plain-torch layers"
OFFERS = GPT2_OPTIONS


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


class LayerNormLinear(nn.Module):
    """y = LayerNorm(x) W^T + b. x: [..., in_features]; y: [..., out_features]."""

    def __init__(self, in_features: int, out_features: int, norm: Norm, bias: bool):
        super().__init__()
        self.epsilon = norm.epsilon
        self.layer_norm_weight = _parameter(in_features)
        self.layer_norm_bias = _parameter(in_features)
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y. `is_first_microbatch` has no effect here."""
        x = F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.epsilon)
        return F.linear(x, self.weight, self.bias)


class Linear(nn.Module):
    """y = x W^T + b. x: [..., in_features]; y: [..., out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y. `is_first_microbatch` has no effect here."""
        return F.linear(x, self.weight, self.bias)


class LayerNormMLP(nn.Module):
    """LayerNorm, a linear to the hidden layer, GELU (tanh form, as GPT-2), and a linear back. x, y: [..., n_embd]."""

    def __init__(self, n_embd: int, mlp: MLP, norm: Norm, bias: bool, recompute: bool = False):
        super().__init__()
        self.recompute, self.epsilon = recompute, norm.epsilon
        self.layer_norm_weight = _parameter(n_embd)
        self.layer_norm_bias = _parameter(n_embd)
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
        x = F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.epsilon)
        x = F.gelu(F.linear(x, self.fc1_weight, self.fc1_bias), approximate="tanh")
        return F.linear(x, self.fc2_weight, self.fc2_bias)


class Attention(nn.Module):
    """Causal attention.

    qkv: [batch, tokens, heads.packed]: queries, then keys, then values, and within each head after head. Returns
    [batch, tokens, heads.queries].
    """

    def __init__(self, heads: Heads, dropout: float):
        super().__init__()
        self.n_head, self.dropout = heads.n_head, dropout

    def forward(self, qkv: Tensor) -> Tensor:
        """Compute attention, with dropout only in training."""
        return causal_attention(qkv, self.n_head, self.dropout if self.training else 0.0)


def causal_attention(qkv: Tensor, n_head: int, dropout: float = 0.0) -> Tensor:
    """Compute what `Attention` does, with the kernel that torch chooses. Queries, keys and values have equal heads."""
    q, k, v = (part.unflatten(2, (n_head, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return y.transpose(1, 2).flatten(2)


def layer_norm_linear(in_features: int, out_features: int, norm: Norm, bias: bool, fp8: bool) -> nn.Module:
    """Build what the package describes. `fp8` has no effect here."""
    return LayerNormLinear(in_features, out_features, norm, bias)


def head(n_embd: int, padded_vocab_size: int, norm: Norm, fp8: bool) -> nn.Module:
    """Build what the package describes. `fp8` has no effect here."""
    return LayerNormLinear(n_embd, padded_vocab_size, norm, bias=False)


def linear(in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module:
    """Build what the package describes. `fp8` has no effect here."""
    return Linear(in_features, out_features, bias)


def layer_norm_mlp(n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: bool, recompute: bool) -> nn.Module:
    """Build what the package describes. `fp8` has no effect here."""
    return LayerNormMLP(n_embd, mlp, norm, bias, recompute)


def attention(heads: Heads, dropout: float) -> nn.Module:
    """Build what the package describes."""
    return Attention(heads, dropout)
