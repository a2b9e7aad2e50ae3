"""The emulated layers: the plain-torch layers, with the operands of the blocks' GEMMs cast to FP8 and back.

They show what FP8 does to training without a GPU for it. The head stays in bf16. As in the fused layers, the residual
stream is rounded once: a branch's result is added to it unrounded, and its gradient is quantized unrounded.
Normalisation, activation and attention are the plain-torch layers'.

Shapes of a product: x [M, K], W [N, K], y [M, N], and g [M, N] is the gradient of y. Its GEMMs are fprop, dgrad (g W)
and wgrad (g^T x). FP8 numbers are exact in bfloat16 and so are their products in float32. So a GEMM multiplies the
unscaled numbers, sums in float32, and multiplies by the inverse scales, as the FP8 matrix units do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.config.kept_layers import MLP, PARTS, Part
from gpt2_fp8.config.schema import AttentionKernel, Recompute
from gpt2_fp8.layers import block, reference
from gpt2_fp8.layers.block import embed
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Place, Scales
from gpt2_fp8.layers.fp8_cast import BLOCK, Operand, Recipe, amax, cast, uncast

# Results that go into the residual stream are not rounded. The activation and its gradient are computed in float32.
_RESULTS = {"qkv": (True, torch.bfloat16), "projection": (False, torch.float32),
            "fc1": (True, torch.float32), "fc2": (False, torch.float32)}  # fmt: skip


class EmulatedScales(Scales):
    """The scales of a model of emulated layers. A backward records the amaxes of its forward too."""

    seen: Tensor  # float32 [tensors], zeros

    def allocate(self, device: torch.device) -> None:
        """See `Scales`."""
        super().allocate(device)
        self._listen()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if "history" in vars(self):
            self._listen()  # on the device where the history is now
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "history" in vars(self):
            self._listen()  # a copy of a tensor has no hooks

    def _listen(self) -> None:
        row = self.history[0]

        @torch.no_grad()
        def record(seen: Tensor) -> None:
            assert seen.grad is not None
            row.copy_(torch.fmax(row, seen.grad))  # NaN is no amax
            seen.grad = None

        self.seen = torch.zeros_like(row).requires_grad_()
        self.seen.register_post_accumulate_grad_hook(record)

    def of(self, places: Iterable[Place]) -> tuple[Tensor, Tensor]:
        """Return some tensors' scales, and the zeros whose gradients are their amaxes."""
        columns = [self.column(place) for place in places]
        return torch.stack([self.scale[i] for i in columns]), torch.stack([self.seen[i] for i in columns])


class Emulation(NamedTuple):
    """How operands are cast.

    With `backward="bf16"` gradients are not, and multiply the forward's operands. With "bf16_wgrad" wgrad has no FP8.
    """

    recipe: Recipe
    forward: torch.dtype  # of activations and weights, a float8 dtype
    gradient: torch.dtype
    backward: str = "fp8"


class Product:
    """What `reference.Product` is, with its operands cast.

    `rounded`: whether the result is rounded to bfloat16. `dtype`: in which the result goes on.
    """

    def __init__(self, how: Emulation, scales: EmulatedScales | None, rounded: bool, dtype: torch.dtype):
        self.how, self.scales, self.rounded, self.dtype = how, scales, rounded, dtype
        self.places: dict[str, Place] = {}  # of the scales, by operand
        if scales is not None:
            self.places = {name: scales.reserve("forward") for name in ("input", "weight")}
            self.places["gradient"] = scales.reserve("gradient")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b [..., N]. x: float32 or bfloat16 [..., K]; weight, bias: float32."""
        scale, seen = (None, None) if self.scales is None else self.scales.of(self.places.values())
        y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, scale, seen, self.how, self.rounded)
        return y.view(*x.shape[:-1], -1).to(self.dtype)


def multiply(a: Operand, b: Operand) -> Tensor:
    """Compute a [M, K] times b [K, N] with float32 sums, float32 [M, N]."""
    if a.values.is_cuda:
        y = torch.mm(a.values.to(torch.bfloat16), b.values.to(torch.bfloat16), out_dtype=torch.float32)
    else:
        y = torch.mm(a.values.float(), b.values.float())
    for scale_inv in (a.scale_inv, b.scale_inv):
        y = y if scale_inv is None else y * scale_inv
    return y


def round_to_bf16(x: Tensor) -> Tensor:
    """Round float32 to bfloat16's numbers."""
    return x.to(torch.bfloat16).float()


class _Linear(torch.autograd.Function):
    """y in float32. `scale` [3]: of x, W and g under delayed scaling. The "gradient" of `seen` [3] is their amaxes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, seen: Tensor | None,
        how: Emulation, rounded: bool,
    ) -> Tensor:  # fmt: skip
        recipe, forward, _, backward = how
        of_x, of_w, of_g = (None, None, None) if scale is None else scale.unbind()
        with torch.autocast(x.device.type, enabled=False):
            inputs = kept = cast(x, recipe, forward, 1, BLOCK, of_x)
            if backward == "bf16_wgrad":
                kept = uncast(x)
            elif backward == "fp8" and recipe == "block":
                kept = cast(x, recipe, forward, BLOCK, 1)
            w = cast(weight, recipe, forward, BLOCK, BLOCK, of_w)
            y = multiply(inputs, w.t())
            y = y if bias is None else y + bias.to(torch.bfloat16).float()
            amaxes = None if scale is None else torch.stack([amax(x), amax(weight)])
        ctx.save_for_backward(*kept, *w, of_g, amaxes)
        ctx.how, ctx.dtype, ctx.has_bias = how, x.dtype, bias is not None
        return round_to_bf16(y) if rounded else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (recipe, _, gradient, backward) = upstream, ctx.how
        *operands, scale, amaxes = ctx.saved_tensors
        x, w = Operand(*operands[:2]), Operand(*operands[2:])
        with torch.autocast(g.device.type, enabled=False):
            for_dgrad = uncast(g) if backward == "bf16" else cast(g, recipe, gradient, 1, BLOCK, scale)
            for_wgrad = cast(g, recipe, gradient, BLOCK, 1, scale) if backward == "fp8" else uncast(g)
            dx = round_to_bf16(multiply(for_dgrad, w)).to(ctx.dtype)
            # without FP8 a GEMM writes bfloat16
            without = backward == "bf16_wgrad"
            dw = torch.mm(for_wgrad.values.t(), x.values).float() if without else multiply(for_wgrad.t(), x)
            db = uncast(g).values.sum(0).float() if ctx.has_bias else None
            seen = None if amaxes is None else torch.cat([amaxes, amax(g).reshape(1)])
        return dx, dw, db, None, seen, None, None


class Emulated(block.Composed):
    """The family of the emulated layers. A part that stays in bf16 is the plain-torch layers'."""

    scales: EmulatedScales | None

    def __init__(
        self, how: Emulation, delayed: DelayedScaling | None, recompute: Recompute, kernel: AttentionKernel = "auto"
    ):
        super().__init__(reference, recompute, kernel)
        self.how, self.scales = how, EmulatedScales(delayed) if delayed else None

    @staticmethod
    @override
    def embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """See `block.Composed`. The residual stream holds bfloat16's numbers, in float32: so its gradient is, too."""
        return embed(ids, tokens, positions).float()

    @override
    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        made = _Block(spec, reference, fp8, self.recompute, self.kernel)
        if fp8 & MLP:
            made.mlp.fc1_product = _in_float32
        for part in PARTS:
            if part in fp8:
                block.put_product(made, part, Product(self.how, self.scales, *_RESULTS[part]))
        return made


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b as autocast does in the plain-torch layers: bfloat16's numbers, in float32."""
    return F.linear(x, weight, bias).float()


class _Block(block.Block):
    @override
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return _AddOnce.apply(x, y.float())


class _AddOnce(torch.autograd.Function):
    """The sum of the residual stream and a branch, rounded once. The branch gets the gradient unrounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return round_to_bf16(x + y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return round_to_bf16(upstream[0]), upstream[0]
