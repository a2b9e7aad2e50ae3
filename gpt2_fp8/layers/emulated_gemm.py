"""The three GEMMs of a linear layer with emulated FP8 operands, in plain torch: fprop, dgrad, wgrad.

Shapes: x [M, K], W [N, K], y = x W^T + b [M, N], and g [M, N] is the gradient of y.

| GEMM | computes | operands, by their switch |
|---|---|---|
| fprop | y = x W^T | `fprop_input`, `weight` |
| dgrad | g W | `dgrad_gradient`, `weight` |
| wgrad | g^T x | `wgrad_gradient`, `wgrad_input` |

FP8 numbers are exact in bfloat16 and so are their products in float32. So a GEMM multiplies the unscaled numbers, sums
in float32, and multiplies by the inverse scales, as the FP8 matrix units do. Without any FP8 operand it is the GEMM of
the plain-torch layers, to the last bit.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.precision_schema import OF_HEAD
from gpt2_fp8.layers.fp8_cast import BLOCK, Cast, Operand, Recipe, amax, cast, uncast


class Casts(NamedTuple):
    """How each operand of the three GEMMs is cast. None: it stays in bfloat16."""

    fprop_input: Cast | None
    weight: Cast | None
    dgrad_gradient: Cast | None
    wgrad_gradient: Cast | None
    wgrad_input: Cast | None


@dataclass(frozen=True)
class Emulation:
    """What is emulated. Formats are float8 dtypes; `switches` are the words of `precision.emulate`."""

    recipe: Recipe
    forward: torch.dtype  # of activations and weights
    gradient: torch.dtype
    switches: Set[str]
    backward: str = "fp8"  # `precision.backward`

    def casts(self) -> Casts:
        """Return how the operands of a block's linear layer are cast."""
        return self._backward(self._switched())

    def _switched(self) -> Casts:
        return Casts(
            fprop_input=self._if("fprop_input", self.forward, 1, BLOCK),
            weight=self._if("weight", self.forward, BLOCK, BLOCK),
            dgrad_gradient=self._if("dgrad_gradient", self.gradient, 1, BLOCK),
            wgrad_gradient=self._if("wgrad_gradient", self.gradient, BLOCK, 1),
            wgrad_input=self._if("wgrad_input", self.forward, BLOCK, 1),
        )

    def head_casts(self, gradient: torch.dtype) -> Casts:
        """Return how the head's operands are cast; its gradient to `gradient`, with a given scale."""
        fixed, inputs = Cast("delayed", gradient, 1, 1), Cast(self.recipe, self.forward, 1, BLOCK)
        weight = inputs._replace(rows=BLOCK)
        casts = Casts(inputs, weight, fixed, fixed, inputs._replace(rows=BLOCK, columns=1))
        if "head" not in self.switches:
            chosen = (OF_HEAD + name in self.switches for name in Casts._fields)
            casts = Casts(*(how if on else None for how, on in zip(casts, chosen, strict=True)))
        return self._backward(casts)

    @property
    def has_head(self) -> bool:
        """Whether an operand of the head is cast."""
        return any(name == "head" or name.startswith(OF_HEAD) for name in self.switches)

    def _backward(self, casts: Casts) -> Casts:
        """Leave out what `precision.backward` keeps in bfloat16.

        With bf16 that is the gradient. The other operands are what the forward has multiplied, as Transformer Engine
        has it ("dequantized"). With bf16_wgrad both operands of wgrad are as they were before any cast.
        """
        if self.backward == "bf16":
            return casts._replace(dgrad_gradient=None, wgrad_gradient=None, wgrad_input=casts.fprop_input)
        return casts._replace(wgrad_gradient=None, wgrad_input=None) if self.backward == "bf16_wgrad" else casts

    def _if(self, switch: str, dtype: torch.dtype, rows: int, columns: int) -> Cast | None:
        return Cast(self.recipe, dtype, rows, columns) if switch in self.switches else None


class Slots(NamedTuple):
    """Delayed scaling's scales for one layer, and where its amaxes go; all None under other recipes.

    `seen_*` are zeros. Their "gradients" are the amaxes: autograd brings them out of a backward, also a compiled one.
    """

    forward: Tensor | None  # float32 [2], of the input and the weight
    gradient: Tensor | None  # float32 [1]
    seen_forward: Tensor | None  # float32 [2]
    seen_gradient: Tensor | None  # float32 [1]


NO_SLOTS = Slots(None, None, None, None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, casts: Casts, slots: Slots, rounded: bool) -> Tensor:
    """Compute x W^T + b, float32 [..., N]. x: float32 or bfloat16 [..., K]; weight, bias: float32.

    `rounded`: to bfloat16's numbers, as a GEMM writes them.
    """
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, *slots, casts, rounded)
    return y.view(*x.shape[:-1], -1)


def product(a: Operand, b: Operand) -> Tensor:
    """Compute a [M, K] times b [K, N] with float32 sums, float32 [M, N]."""
    if a.values.is_cuda:
        y = torch.mm(a.values.to(torch.bfloat16), b.values.to(torch.bfloat16), out_dtype=torch.float32)
    else:
        y = torch.mm(a.values.float(), b.values.float())
    for scale_inv in (a.scale_inv, b.scale_inv):
        if scale_inv is not None:
            y = y * scale_inv
    return y


def rounded_product(a: Operand, b: Operand) -> Tensor:
    """Compute the same, rounded to bfloat16's numbers."""
    if a.fp8 or b.fp8:
        return round_to_bf16(product(a, b))
    return torch.mm(a.values, b.values).float()


def round_to_bf16(x: Tensor) -> Tensor:
    """Round float32 to bfloat16's numbers."""
    return x.to(torch.bfloat16).float()


def without_autocast(x: Tensor) -> torch.autocast:
    """Enter a region in which dtypes are as written."""
    return torch.autocast(x.device.type, enabled=False)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, forward_scale: Tensor | None,
        gradient_scale: Tensor | None, seen_forward: Tensor | None, seen_gradient: Tensor | None,
        casts: Casts, rounded: bool,
    ) -> Tensor:  # fmt: skip
        with without_autocast(x):
            inputs, w, seen = cast_forward(x, weight, casts, forward_scale)
            y = _fprop(inputs.fprop, w, bias, rounded)
        kept = inputs.wgrad
        ctx.save_for_backward(kept.values, kept.scale_inv, w.values, w.scale_inv, gradient_scale, seen)
        ctx.casts, ctx.input_dtype, ctx.has_bias = casts, x.dtype, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (g,), casts = upstream, ctx.casts
        values, scale_inv, w_values, w_scale_inv, gradient_scale, seen = ctx.saved_tensors
        x = Operand(values, scale_inv, casts.wgrad_input is not None)
        w = Operand(w_values, w_scale_inv, casts.weight is not None)
        with without_autocast(g):
            dx = rounded_product(cast(g, casts.dgrad_gradient, gradient_scale), w).to(ctx.input_dtype)
            dw = weight_gradient(cast(g, casts.wgrad_gradient, gradient_scale), x)
            db = uncast(g).values.sum(0).float() if ctx.has_bias else None
            seen_gradient = None if seen is None else amax(g).reshape(1)
        return dx, dw, db, None, None, seen, seen_gradient, None, None


class Inputs(NamedTuple):
    """A layer's input as two GEMMs take it. Both are the same unless their switches or blocks differ."""

    fprop: Operand
    wgrad: Operand


def cast_forward(
    x: Tensor, weight: Tensor, casts: Casts, scale: Tensor | None
) -> tuple[Inputs, Operand, Tensor | None]:
    """Cast the input [M, K] and the weight [N, K]; the third result is their amaxes, float32 [2].

    `scale`: float32 [2], theirs; None without delayed scaling, as are the amaxes.
    """
    ours, its = (None, None) if scale is None else (scale[0], scale[1])
    fprop = cast(x, casts.fprop_input, ours)
    by_blocks = casts.fprop_input is not None and casts.fprop_input.recipe == "block"
    same = (casts.fprop_input is None) == (casts.wgrad_input is None)
    same = same and (not by_blocks or casts.fprop_input == casts.wgrad_input)
    wgrad = fprop if same else cast(x, casts.wgrad_input, ours)
    seen = None if scale is None else torch.stack([amax(x), amax(weight)])
    return Inputs(fprop, wgrad), cast(weight, casts.weight, its), seen


def _fprop(x: Operand, w: Operand, bias: Tensor | None, rounded: bool) -> Tensor:
    """Compute x W^T + b, float32 [M, N]."""
    bias = None if bias is None else bias.to(torch.bfloat16)
    if rounded and not (x.fp8 or w.fp8):
        return F.linear(x.values, w.values, bias).float()
    y = product(x, w.t())
    if bias is not None:
        y = y + bias.float()
    return round_to_bf16(y) if rounded else y


def weight_gradient(g: Operand, x: Operand) -> Tensor:
    """Compute g^T x, float32 [N, K], from g [M, N] and x [M, K]. Only a GEMM without FP8 rounds it to bfloat16."""
    return product(g.t(), x) if g.fp8 or x.fp8 else rounded_product(g.t(), x)
