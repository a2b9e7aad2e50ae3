"""The layers of Transformer Engine: normalisation, cast to FP8, product, bias and GELU fused.

Parameters are float32; activations take the dtype of `torch.autocast`, and products are FP8 inside `te.autocast`.
Importing this module needs nothing; calling its functions needs Transformer Engine and a CUDA device.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn


@functools.cache
def _variant(name: str, fp8: bool) -> type[nn.Module]:
    """A class of Transformer Engine with two changes.

    It has no extra state: TE's own is a pickle, which it refuses to load itself since 2.18 (TransformerEngine#3123);
    `precision.state` saves the scales as tensors. And with `fp8=False` it leaves FP8 autocast for its own forward.
    """
    import transformer_engine.pytorch as te

    base = getattr(te, name)

    def forward_without_fp8(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with te.autocast(enabled=False):
            return base.forward(self, *args, **kwargs)

    members: dict[str, Any] = {
        "get_extra_state": nn.Module.get_extra_state,  # torch leaves the key out when the method is Module's own
        "set_extra_state": nn.Module.set_extra_state,
    }
    if not fp8:
        members["forward"] = forward_without_fp8
    return type(name, (base,), members)


def _options(bias: bool) -> dict[str, Any]:
    leave = lambda weight: weight  # noqa: E731 - model.initialise fills every parameter
    return {"bias": bias, "params_dtype": torch.float32, "init_method": leave}


def layer_norm_linear(in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module:
    """See the package."""
    return _variant("LayerNormLinear", fp8)(in_features, out_features, **_options(bias))


def linear(in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module:
    """See the package."""
    return _variant("Linear", fp8)(in_features, out_features, **_options(bias))


def layer_norm_mlp(n_embd: int, bias: bool, fp8: bool, recompute: bool) -> nn.Module:
    """See the package."""
    options = _options(bias)
    options["output_layer_init_method"] = options["init_method"]
    return _variant("LayerNormMLP", fp8)(n_embd, 4 * n_embd, activation="gelu", checkpoint=recompute, **options)


class Attention(nn.Module):
    """Causal attention through TE's choice of kernel (cuDNN on Hopper), in bf16: FP8 gains nothing at heads of 64.

    qkv: [batch, tokens, 3 * n_embd] as in `reference.Attention`; returns [batch, tokens, n_embd].
    """

    def __init__(self, n_head: int, n_embd: int, dropout: float):
        super().__init__()
        from transformer_engine.pytorch.utils import SplitAlongDim

        # Its backward returns the packed gradient. Torch's views copy it (14 ms of a 186 ms step), and so does the
        # `qkv_layer=` argument that Transformer Engine 2.20 recommends instead of finding out by pointers.
        self.split = SplitAlongDim
        warnings.filterwarnings("ignore", message="Relying on pointer-based detection", category=DeprecationWarning)
        self.n_head, self.n_embd = n_head, n_embd
        self.kernel = _variant("DotProductAttention", True)(
            n_head, n_embd // n_head, attention_dropout=dropout, qkv_format="bshd", attn_mask_type="causal"
        )

    def forward(self, qkv: Tensor) -> Tensor:
        batch, tokens, _ = qkv.shape
        packed = qkv.view(batch, tokens, 3, self.n_head, self.n_embd // self.n_head)
        q, k, v = (part.squeeze(2) for part in self.split.apply(packed, 2, [1, 1, 1]))
        return self.kernel(q, k, v)


def attention(n_head: int, n_embd: int, dropout: float) -> nn.Module:
    """See the package."""
    return Attention(n_head, n_embd, dropout)
