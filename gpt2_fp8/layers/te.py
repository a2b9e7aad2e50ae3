"""Transformer Engine's layers: normalisation, quantization to FP8, GEMM, bias and GELU fused.

Parameters are float32. Activations take the dtype of `torch.autocast`, and GEMMs are FP8 inside `te.autocast`.
Importing this module needs nothing. Calling its functions needs Transformer Engine and a CUDA device.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.compat.transformer_engine import apply_rotary, computed_twice, entered_recipe, split_along_dim
from gpt2_fp8.config.block_spec import MLP, Heads, Norm
from gpt2_fp8.config.kept_layers import Part
from gpt2_fp8.config.schema import AttentionKernel
from gpt2_fp8.layers import reference

NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
ACTIVATION = {"gelu": "gelu", "swiglu": "swiglu", "relu_squared": "srelu"}
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
    if recipe is None or getattr(recipe, "fp8_format", Format.HYBRID) == Format.HYBRID:
        return nullcontext()
    recipe = copy.copy(recipe)
    recipe.fp8_format = Format.HYBRID
    return te.autocast(enabled=True, recipe=recipe)


@functools.cache
def _variant(name: str, region: Region = nullcontext) -> type[nn.Module]:
    """Derive a class from one of Transformer Engine's, with two changes.

    First, it has no extra state. TE's own is a pickle, which TE itself refuses to load since 2.18
    (TransformerEngine#3123). `fp8.state` saves the scales as tensors instead. Second, its forward enters
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
    leave = lambda weight: weight  # noqa: E731 - model.gpt2.initialise fills every parameter
    return {"bias": bias, "params_dtype": torch.float32, "init_method": leave}


def _normalisation(norm: Norm) -> dict[str, Any]:
    return {"eps": norm.epsilon, "normalization": NORMALIZATION[norm.kind]}


def again(part: Callable[..., Tensor], *inputs: Any, draws: bool) -> Tensor:
    """See `reference.again`. The second pass has the scales of the first, and its amaxes are not counted.

    TE's own `checkpoint` enters a new region in the backward. On leaving that, TE moves every history on by a step: a
    history of 16 would end within two micro-batches of 12 blocks.
    """
    # Not stopped early: an exception in the midst of a layer would leave its scales as they were.
    return reference.again(part, *inputs, draws=draws, context_fn=computed_twice, early_stop=False)


def layer_norm_linear(in_features: int, out_features: int, norm: Norm, bias: bool, fp8: bool) -> nn.Module:
    """Build what the package describes."""
    variant = _variant("LayerNormLinear", _region(fp8))
    return variant(in_features, out_features, **_normalisation(norm), **_options(bias))


def head(n_embd: int, padded_vocab_size: int, norm: Norm, fp8: bool) -> nn.Module:
    """Build what the package describes."""
    region = _gradient_in_e5m2 if fp8 else _without_fp8
    options = _normalisation(norm) | _options(bias=False)
    return _variant("LayerNormLinear", region)(n_embd, padded_vocab_size, **options)


def linear(in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module:
    """Build what the package describes."""
    return _variant("Linear", _region(fp8))(in_features, out_features, **_options(bias))


def normalisation(layer: nn.LayerNorm | nn.RMSNorm) -> nn.Module | None:
    """Build Transformer Engine's for a normalisation of torch, without values; None where it has no such one."""
    if layer.weight is None or layer.eps is None or (isinstance(layer, nn.LayerNorm) and layer.bias is None):
        return None
    kind = "LayerNorm" if isinstance(layer, nn.LayerNorm) else "RMSNorm"
    return _variant(kind)(layer.normalized_shape, eps=layer.eps, device="meta", dtype=layer.weight.dtype)


def layer_norm_mlp(n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: Set[Part], recompute: bool) -> nn.Module:
    """Build what the package describes."""
    options = _normalisation(norm) | _options(bias)
    options["output_layer_init_method"] = options["init_method"]
    return _variant("LayerNormMLP", _region(bool(fp8)))(
        n_embd, mlp.width, activation=ACTIVATION[mlp.kind], checkpoint=recompute, **options
    )


class SplitMLP(nn.Module):
    """An MLP of two modules, for what Transformer Engine's own `LayerNormMLP` cannot do.

    That is one of its two products in bf16, and FP8 with a backward in bf16. Between the products a kernel of torch's
    reads and writes bfloat16. Parameters have the names of those of `reference.LayerNormMLP`.
    """

    def __init__(self, n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: Set[Part], recompute: bool):
        super().__init__()
        self.recompute, self.kind = recompute, mlp.kind
        self.fc1 = layer_norm_linear(n_embd, mlp.projected, norm, bias, "fc1" in fp8)
        self.fc2 = linear(mlp.width, n_embd, bias, "fc2" in fp8)
        self._lent: list[tuple[nn.Module, str, str]] = []  # a layer, and the names of a parameter there and here
        for name in ("layer_norm_weight", "layer_norm_bias"):
            self._take_over(self.fc1, name, name)
        for layer, of in ((self.fc1, "fc1"), (self.fc2, "fc2")):
            self._take_over(layer, "weight", f"{of}_weight")
            self._take_over(layer, "bias", f"{of}_bias")

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y. `is_first_microbatch`: see `GPT2.forward`."""
        if self.recompute:
            return again(self._forward, x, is_first_microbatch, draws=False)
        return self._forward(x, is_first_microbatch)

    def _take_over(self, layer: nn.Module, name: str, own: str) -> None:
        """Register a layer's parameter here as `own`, and None if it has none. `_forward` lends it to the layer."""
        parameter = dict(layer.named_parameters(recurse=False)).get(name)
        setattr(self, own, parameter)
        if parameter is not None:
            delattr(layer, name)
            self._lent.append((layer, name, own))

    def _forward(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        for layer, name, own in self._lent:  # each time: FSDP puts gathered ones into the place of its own
            object.__setattr__(layer, name, getattr(self, own))  # torch's own __setattr__ would register it there
        h = self.fc1(x, is_first_microbatch)
        return self.fc2(reference.activate(h, self.kind), is_first_microbatch)


class Attention(reference.Attention):
    """Causal attention with the kernel that TE chooses, in bf16: FP8 gains nothing with heads of 64.

    On Hopper that is cuDNN's for the heads that `config.block_spec.cudnn_takes`.

    `kernel`: another than "auto" and "te" is torch's, as `reference.Attention` has it.

    RoPE is TE's fused kernel. QK-norm is torch's: TE has none apart from its own multi-head attention.
    """

    def __init__(self, heads: Heads, dropout: float, epsilon: float = 1e-5, kernel: AttentionKernel = "auto"):
        super().__init__(heads, dropout, epsilon, kernel)
        self.splitter = split_along_dim()
        # Transformer Engine 2.20 recommends its argument `qkv_layer=` instead, but the backward of that copies.
        warnings.filterwarnings("ignore", message="Relying on pointer-based detection", category=DeprecationWarning)
        self.kernel = None
        if kernel in ("auto", "te"):
            self.kernel = _variant("DotProductAttention")(
                heads.n_head, heads.size, num_gqa_groups=heads.n_kv_head, attention_dropout=dropout,
                qkv_format="bshd", attn_mask_type="causal",
            )  # fmt: skip

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Split into queries, keys and values, with a backward that does not copy."""
        batch, tokens, _ = qkv.shape
        n_head, n_kv_head, size = self.heads.n_head, self.heads.n_kv_head, self.heads.size
        if n_head != n_kv_head:
            return self.splitter.apply(qkv.view(batch, tokens, -1, size), 2, [n_head, n_kv_head, n_kv_head])
        parts = self.splitter.apply(qkv.view(batch, tokens, 3, n_head, size), 2, [1, 1, 1])
        return tuple(part.squeeze(2) for part in parts)

    def rotate(self, x: Tensor, angle: Tensor) -> Tensor:
        """Turn queries or keys; the kernel computes in float32."""
        both = torch.cat((angle, angle), dim=-1).float()[:, None, None]  # of each half: [tokens, 1, 1, size]
        return apply_rotary()(x, both, tensor_format="bshd", fused=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention; its dropout is the kernel's. TE's takes no mask here; with one, torch's is built."""
        if self.kernel is None:
            return super().attend(q, k, v, mask)
        assert mask is None
        return self.kernel(q, k, v)


attention = Attention
split = SimpleNamespace(  # these layers with such an MLP
    again=again, attention=attention, head=head, layer_norm_linear=layer_norm_linear, linear=linear,
    layer_norm_mlp=SplitMLP,
)  # fmt: skip
