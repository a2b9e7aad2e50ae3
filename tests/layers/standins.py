"""Every set of layers, built on a machine that has neither Triton nor Transformer Engine (tests/gpu has both).

Building the fused layers needs only that Triton's decorators can be named. Of Transformer Engine's modules there are
stand-ins that take our arguments and have the parameters that it documents.
"""

import importlib.util
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn

import gpt2_fp8.fp8.resolve  # noqa: F401  # what needs no stand-in is there before them
from gpt2_fp8.layers import attention, reference, te
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import DelayedScaling

FAMILIES = ["reference", "te", "fused"]
SCALING = DelayedScaling(
    history=2, margin=0, most_recent=False, forward=torch.float8_e4m3fn, gradient=torch.float8_e5m2
)
TE = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.utils")


@contextmanager
def families():
    """Within, `load(name)` gives any set of layers, and each can be built. What stands on a stand-in is then gone."""
    before, without_triton = set(sys.modules), importlib.util.find_spec("triton") is None
    te._variant.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (_transformer_engine() | (_triton() if without_triton else {})).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(attention, "why_no_flash", lambda: None)
        yield load
    te._variant.cache_clear()
    for name in set(sys.modules) - before if without_triton else ():
        package, _, module = name.rpartition(".")
        if package in ("gpt2_fp8.kernels", "gpt2_fp8.layers"):
            del sys.modules[name]
            vars(sys.modules[package]).pop(module, None)


def load(name):
    """A set of layers by its name; the fused ones with delayed scaling."""
    if name == "fused":
        from gpt2_fp8.layers.fused import Fused

        return Fused(SCALING, recompute="none")
    return Composed({"te": te, "reference": reference}[name], recompute="none")


def _triton():
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.language, language.constexpr = lambda function: function, language, lambda value: value
    return {"triton": triton, "triton.language": language}


def _transformer_engine():
    package, pytorch, utils = (ModuleType(name) for name in TE)
    package.pytorch, utils.SplitAlongDim = pytorch, None
    for kind in (Linear, LayerNormLinear, LayerNormMLP, DotProductAttention):
        setattr(pytorch, kind.__name__, kind)
    return dict(zip(TE, (package, pytorch, utils), strict=True))


def _parameter(*shape):
    return nn.Parameter(torch.empty(shape))


def _norm_bias(width, normalization):
    return {"LayerNorm": _parameter(width), "RMSNorm": None}[normalization]


class Linear(nn.Module):
    def __init__(self, in_features, out_features, *, bias, params_dtype, init_method):
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, eps, *, normalization, **options):
        super().__init__(in_features, out_features, **options)
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = _parameter(in_features)
        self.layer_norm_bias = _norm_bias(in_features, normalization)


class LayerNormMLP(nn.Module):
    def __init__(
        self, hidden_size, ffn_hidden_size, eps, *, normalization, activation, checkpoint, bias, params_dtype,
        init_method, output_layer_init_method,
    ):  # fmt: skip
        super().__init__()
        self.eps, self.activation, self.normalization = eps, activation, normalization
        self.layer_norm_weight = _parameter(hidden_size)
        self.layer_norm_bias = _norm_bias(hidden_size, normalization)
        projected = {"gelu": 1, "swiglu": 2, "srelu": 1}[activation] * ffn_hidden_size
        self.fc1_weight, self.fc2_weight = _parameter(projected, hidden_size), _parameter(hidden_size, ffn_hidden_size)
        self.fc1_bias, self.fc2_bias = (_parameter(projected), _parameter(hidden_size)) if bias else (None, None)


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, *, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type
    ):
        super().__init__()
        self.heads, self.groups = (num_attention_heads, kv_channels), num_gqa_groups
