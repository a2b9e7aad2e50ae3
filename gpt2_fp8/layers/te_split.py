"""Transformer Engine's layers with an MLP of two modules, for what its own `LayerNormMLP` cannot do.

That is one of its two products in bf16, and FP8 with a backward in bf16. The activation is then a kernel of torch's,
whose input and output are bfloat16 in memory. Everything else is `te`'s.
"""

from __future__ import annotations

from collections.abc import Set

import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_fp8.config.block_spec import MLP, Norm
from gpt2_fp8.config.kept_layers import Part
from gpt2_fp8.layers import te
from gpt2_fp8.layers.te import NAME, OFFERS, again, attention, head, layer_norm_linear, linear

__all__ = ["NAME", "OFFERS", "again", "attention", "head", "layer_norm_linear", "layer_norm_mlp", "linear"]


class LayerNormMLP(nn.Module):
    """What `reference.LayerNormMLP` computes, under the same parameter names. x, y: [..., n_embd]."""

    def __init__(self, n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: Set[Part], recompute: bool):
        super().__init__()
        self.recompute, self.gated = recompute, mlp.kind == "swiglu"
        self.fc1 = te.layer_norm_linear(n_embd, mlp.projected, norm, bias, "fc1" in fp8)
        self.fc2 = te.linear(mlp.width, n_embd, bias, "fc2" in fp8)
        self.layer_norm_weight = _taken_over(self.fc1, "layer_norm_weight")
        self.layer_norm_bias = _taken_over(self.fc1, "layer_norm_bias")
        self.fc1_weight, self.fc1_bias = (_taken_over(self.fc1, name) for name in ("weight", "bias"))
        self.fc2_weight, self.fc2_bias = (_taken_over(self.fc2, name) for name in ("weight", "bias"))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute y. `is_first_microbatch`: see `GPT2.forward`."""
        if self.recompute:
            return te.again(self._forward, x, is_first_microbatch, draws=False)
        return self._forward(x, is_first_microbatch)

    def _forward(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        h = self.fc1(x, is_first_microbatch)
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            z = F.silu(gate) * h
        else:
            z = F.gelu(h, approximate="tanh")
        return self.fc2(z, is_first_microbatch)


def _taken_over(layer: nn.Module, name: str) -> nn.Parameter | None:
    """Take a parameter out of a layer's own, for its owner to register. The layer computes with it as before.

    None: the layer has none of this name.
    """
    parameter = dict(layer.named_parameters(recurse=False)).get(name)
    if parameter is not None:
        delattr(layer, name)
        object.__setattr__(layer, name, parameter)  # torch's own __setattr__ would register it again
    return parameter


def layer_norm_mlp(n_embd: int, mlp: MLP, norm: Norm, bias: bool, fp8: Set[Part], recompute: bool) -> nn.Module:
    """Build what the package describes."""
    return LayerNormMLP(n_embd, mlp, norm, bias, fp8, recompute)
