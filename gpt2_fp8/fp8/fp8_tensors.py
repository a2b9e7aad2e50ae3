"""Which tensors of a run's model are in FP8, and in which format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gpt2_fp8.config.kept_layers import PARTS, kept
from gpt2_fp8.config.schema import FP8PrecisionConfig
from gpt2_fp8.fp8.recipes import formats

Kind = Literal["input", "weight", "gradient"]
KINDS: tuple[Kind, ...] = ("input", "weight", "gradient")
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
HEAD = "head"
HEAD_GRADIENT = torch.float8_e5m2  # under every precision


@dataclass(frozen=True)
class FP8Tensor:
    """One FP8 tensor of a model.

    Attributes:
        layer: its name in `precision.keep_bf16`: blocks.3.fc1, or head.
        kind: the layer's input, its weight, or the gradient of its output.
        dtype: the format, a float8 dtype.
    """

    layer: str
    kind: Kind
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"the {self.kind} of {self.layer}"

    @property
    def of_logits(self) -> bool:
        """Whether it is the gradient of the logits. Much of that is 0 in any run: the probabilities of rare tokens."""
        return (self.layer, self.kind) == (HEAD, "gradient")

    @property
    def format(self) -> str:
        """The format's name: e4m3 or e5m2."""
        return FORMATS[self.dtype]


def fp8_tensors(precision: FP8PrecisionConfig, n_layer: int) -> list[FP8Tensor]:
    """List the FP8 tensors of a model of `n_layer` blocks, layer after layer. An emulated head is in bf16.

    A backward in bf16 has no FP8 gradient; under bf16_wgrad the other product of the backward still has.
    """
    in_bf16 = kept(precision.keep_bf16, n_layer)
    forward, gradient = formats(precision)
    layers = [(f"blocks.{i}.{part}", gradient) for i in range(n_layer) for part in PARTS if part in in_bf16.in_fp8(i)]
    if not in_bf16.head and precision.backend != "emulated":
        layers.append((HEAD, HEAD_GRADIENT))
    return [
        FP8Tensor(layer, kind, back if kind == "gradient" else forward)
        for layer, back in layers
        for kind in KINDS
        if not (kind == "gradient" and precision.backward == "bf16")
    ]
