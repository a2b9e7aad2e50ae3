"""The same four layers twice, with the same parameter names and shapes: `te` (Transformer Engine) and `reference`
(plain torch). A state dict moves between them as it is.

Each offers, as functions that return a module:

- `layer_norm_linear(in_features, out_features, bias, fp8)`: `layer_norm_weight, layer_norm_bias, weight[, bias]`
- `linear(in_features, out_features, bias, fp8)`: `weight[, bias]`
- `layer_norm_mlp(n_embd, bias, fp8)`: `layer_norm_*, fc1_weight[, fc1_bias], fc2_weight[, fc2_bias]`
- `attention(n_head, n_embd, dropout)`: causal attention over packed queries, keys and values; no parameters

The first three are called as `layer(x, is_first_microbatch)`. Parameters are left for `model.initialise` to fill.
"""

from __future__ import annotations

import importlib
from typing import Literal, Protocol, cast

from torch import nn

Backend = Literal["te", "reference"]


class Layers(Protocol):
    """What a backend offers. `fp8=False` keeps a layer's products in the autocast dtype even inside FP8 autocast."""

    def layer_norm_linear(self, in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module: ...

    def linear(self, in_features: int, out_features: int, bias: bool, fp8: bool) -> nn.Module: ...

    def layer_norm_mlp(self, n_embd: int, bias: bool, fp8: bool) -> nn.Module: ...

    def attention(self, n_head: int, n_embd: int, dropout: float) -> nn.Module: ...


def load(backend: Backend) -> Layers:
    """The layers of a backend. `te` needs Transformer Engine and a CUDA device when its functions are called."""
    return cast(Layers, importlib.import_module(f"{__name__}.{backend}"))
