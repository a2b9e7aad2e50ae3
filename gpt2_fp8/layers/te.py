"""Transformer Engine's layers: normalisation, quantization to FP8, GEMM, bias and GELU fused.

Parameters are float32. Activations take the dtype of `torch.autocast`, and GEMMs are FP8 inside `te.autocast`.
Importing this module needs nothing. Calling its functions needs Transformer Engine and a CUDA device.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.compat.transformer_engine import entered_recipe, split_along_dim
from gpt2_fp8.config.block_spec import GPT2_OPTIONS, MLP, Heads, Norm

NAME = "Transformer Engine's layers here"
OFFERS = GPT2_OPTIONS
Region = Callable[[], AbstractContextManager[None]]


def _without_fp8() -> AbstractContextManager[None]:
    import transformer_engine.pytorch as te

    return te.autocast(enabled=False)


def _gradient_in_e5m2() -> AbstractContextManager[None]:
    """Enter the current FP8 region again, but with gradients in E5M2. For the head.

    The head's gradient reaches from 1 down to the probabilities of rare tokens. E4M3 rounds values below 2^-18 to 0, so
    nothing would push those tokens down.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Format

    recipe = entered_recipe()
    if recipe is None or recipe.fp8_format == Format.HYBRID:
        return nullcontext()
    recipe = copy.copy(recipe)
    recipe.fp8_format = Format.HYBRID
    return te.autocast(enabled=True, recipe=recipe)


@functools.cache
def _variant(name: str, region: Region = nullcontext) -> type[nn.Module]:
    """Derive a class from one of Transformer Engine's, with two changes.

    First, it has no extra state. TE's own is a pickle, which TE itself refuses to load since 2.18
    (TransformerEngine#3123). `precision.state` saves the scales as tensors instead. Second, its forward enters
    `region`, also kept as `fp8_region`.
    """
    import transformer_engine.pytorch as te

    base = getattr(te, name)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with region():
            return base.forward(self, *args, **kwargs)

    members: dict[str, Any] = {
        "get_extra_state": nn.Module.get_extra_state,  # torch omits the key if the method is Module's own
        "set_extra_state": nn.Module.set_extra_state,
        "fp8_region": staticmethod(region),
    }
    if region is not nullcontext:
        members["forward"] = forward
    return type(name, (base,), members)


def _region(fp8: bool) -> Region:
    return nullcontext if fp8 else _without_fp8


def _options(bias: bool) -> dict[str, Any]:
    leave = lambda weight: weight  # noqa: E731 - model.initialise fills every parameter
    return {"bias": bias, "params_dtype": torch.float32, "init_method": leave}


def layer_norm_linear(in_features: int, out_features: int, norm: Norm, bias: bool, fp8: bool) -> nn.Module:
    """Build what the package describes."""
    variant = _variant("LayerNormLinear", _region(fp8))
    return variant(in_features, out_features, eps=norm.epsilon, **_options(bias))


def head(n_embd: int, padded_vocab_size: int, norm: Norm, fp8: bool) -> nn.Module:
    """Build what the package describes."""
    region = _gradient_in_e5m2 if fp8 else _without_fp8
    return _variant("LayerNormLinear", region)(n_embd, padded_vocab_size, eps=norm.epsilon, **_options(bias=False))


def linear(in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module:
    """Build what the package describes."""
    return _variant("Linear", _region(fp8))(in_features, out_features, **_options(bias))


def layer_norm_mlp(n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: bool, recompute: bool) -> nn.Module:
    """Build what the package describes."""
    options = _options(bias)
    options["output_layer_init_method"] = options["init_method"]
    return _variant("LayerNormMLP", _region(fp8))(
        n_embd, mlp.width, eps=norm.epsilon, activation=mlp.kind, checkpoint=recompute, **options
    )


class Attention(nn.Module):
    """Causal attention with the kernel that TE chooses (cuDNN on Hopper), in bf16: FP8 gains nothing with heads of 64.

    qkv: [batch, tokens, heads.packed] as in `reference.Attention`; returns [batch, tokens, heads.queries].
    """

    def __init__(self, heads: Heads, dropout: float):
        super().__init__()
        self.split = split_along_dim()
        # Transformer Engine 2.20 recommends its argument `qkv_layer=` instead, but the backward of that copies.
        warnings.filterwarnings("ignore", message="Relying on pointer-based detection", category=DeprecationWarning)
        self.heads = heads
        self.kernel = _variant("DotProductAttention")(
            heads.n_head, heads.size, attention_dropout=dropout, qkv_format="bshd", attn_mask_type="causal"
        )

    def forward(self, qkv: Tensor) -> Tensor:
        """Compute attention."""
        batch, tokens, _ = qkv.shape
        packed = qkv.view(batch, tokens, 3, self.heads.n_head, self.heads.size)
        q, k, v = (part.squeeze(2) for part in self.split.apply(packed, 2, [1, 1, 1]))
        return self.kernel(q, k, v)


def attention(heads: Heads, dropout: float) -> nn.Module:
    """Build what the package describes."""
    return Attention(heads, dropout)
