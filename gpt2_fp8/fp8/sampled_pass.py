"""A forward and backward of a few sequences in a bf16 twin of the model, which observes every FP8 tensor on its way.

It is the same for all backends. The twin shares the parameters, and computes in bf16 what the FP8 layers compute. So
inputs and gradients are nearly those of the run, and weights are exactly those. Each is quantized as the run does it.

A cast saturates a value that it would round beyond the format's largest number; it flushes one that is not 0 and
becomes 0. Both are counted over the values that are not 0; of a large tensor, every n-th value is looked at, or every
n-th row.

Nothing of the run changes: no gradient is left in a parameter, no scale or history is written, no random number is
drawn (the twin has no dropout), and no rank waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.config.kept_layers import PARTS
from gpt2_fp8.config.schema import FP8PrecisionConfig
from gpt2_fp8.fp8.base import Backend, twin_of
from gpt2_fp8.fp8.fp8_tensors import HEAD, FP8Tensor, fp8_tensors
from gpt2_fp8.layers.block import put_product
from gpt2_fp8.layers.fp8_cast import scale_of
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.loss import loss_of, trained_loss
from gpt2_fp8.runtime.sharding import is_divided

Observe = Callable[[str, str, Tensor], None]
Recipe = Literal["delayed", "current", "rowwise", "block", "mxfp8"]
MOST = 1 << 18  # values of a tensor that are looked at
BLOCKS = {"block": 128, "mxfp8": 32}  # values with a scale of their own, along the summed dimension
# The largest magnitude that is still rounded to the largest number, and the largest that is rounded to 0: half a step
# beyond 448 (E4M3) and 57,344 (E5M2), and half of the smallest numbers 2^-9 and 2^-16. A tie goes to the even number.
_LARGEST_KEPT = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}
_LARGEST_FLUSHED = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}


class SampledPass:
    """Observes the FP8 tensors of `model`, which `backend` computes. Its twin is built at the first call."""

    def __init__(self, backend: Backend, model: GPT2):
        precision = backend.config.precision
        assert isinstance(precision, FP8PrecisionConfig)
        assert backend.recipe is not None
        assert backend.recipe.name != "registered", "whose casts are not known"
        self.backend, self.model = backend, model
        self.recipe: Recipe = backend.recipe.name
        self.tensors = fp8_tensors(precision, backend.config.model.n_layer)
        self._by_name: dict[tuple[str, str], FP8Tensor] = {(found.layer, found.kind): found for found in self.tensors}
        self._twin: GPT2 | None = None
        self._observe: Observe  # of the pass under way

    def __call__(
        self, ids: Tensor, share: int, micro_batch: int, scales: Mapping[FP8Tensor, Tensor]
    ) -> dict[FP8Tensor, Tensor]:
        """Return the figures of each tensor that was met: float32 [4] on the device, as `figures` has them.

        Args:
            ids: int32 [sequences, n_positions + 1]; -1 is padding.
            share: sequences that a rank computes in a step: gradients are of the mean over these.
            micro_batch: sequences that the run computes at once; these here may be fewer.
            scales: float32 scalars of the tensors whose scale is stored.
        """
        given = dict(scales)
        factor_of = getattr(self.model.head, "gradient_factor", None)  # the fused head's alone
        if (head := self._by_name.get((HEAD, "gradient"))) and factor_of is not None:
            targets = torch.count_nonzero(ids[:, 1:] >= 0).clamp_min(1)
            given[head] = factor_of(micro_batch * (ids.shape[1] - 1)) * targets * (share / len(ids))
        found: dict[FP8Tensor, Tensor] = {}

        def observe(layer: str, kind: str, x: Tensor) -> None:
            if (tensor := self._by_name.get((layer, kind))) is not None:
                found[tensor] = figures(x, tensor.dtype, self.recipe, given.get(tensor))

        self._observe = observe
        with torch.inference_mode(False), torch.enable_grad():
            self._go(ids, len(ids) / share)
        return found

    def _go(self, ids: Tensor, scale: float) -> None:
        twin, start = self._build_twin(), []
        hook = twin.blocks[0].register_forward_pre_hook(lambda _, given: start.append(given[0]))
        try:
            with self.backend.forward_context(fp8=False):
                loss = loss_of(twin, ids, None, scale, ids.is_cuda, self.backend.config.penalty)
        finally:
            hook.remove()
        # Of the start of the residual stream alone: no parameter's gradient is computed, or touched.
        torch.autograd.grad(trained_loss(loss), start[0])

    def _build_twin(self) -> GPT2:
        if self._twin is None:
            # in bf16 its activations take more memory than training's: not all GPUs may run out of it at one place
            recompute = "full" if is_divided(self.model) else self.backend.config.activation_checkpointing
            self._twin = twin_of(self.model, recompute).eval()
            for i, block in enumerate(self._twin.blocks):
                for part in PARTS:
                    put_product(block, part, self._product(f"blocks.{i}.{part}"))
            head: Any = self._twin.head
            head.product = self._product(HEAD)
        return self._twin

    def _product(self, layer: str) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """Return a product that observes its operands, and in its backward the gradient of its result."""

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            self._observe(layer, "input", x)
            self._observe(layer, "weight", weight)
            y = F.linear(x, weight, bias)
            y.register_hook(lambda gradient: self._observe(layer, "gradient", gradient))
            return y

        return product


@torch.no_grad()
def figures(x: Tensor, dtype: torch.dtype, recipe: Recipe, scale: Tensor | None = None) -> Tensor:
    """Compute amax, scale, the share that saturates, and the share that is flushed; float32 [4] on the device.

    x: any float dtype, [..., channels]. `scale`: float32 scalar, where it is given; None: the recipe takes it from the
    tensor itself. Where the recipe has several scales a tensor, the second figure is that of the block with the amax,
    which is the smallest. The amax is NaN if a value is.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    amax = rows.abs().amax().float()
    if scale is None and recipe in ("rowwise", "block", "mxfp8"):
        rows = rows[:: max(1, rows.numel() // MOST)].float()
        scales = _scales_of_blocks(rows, dtype, BLOCKS.get(recipe, rows.shape[1]))
        return torch.stack([amax, _power_of_two(scale_of(amax, dtype)), *_shares(rows, scales, dtype)])
    scale = scale_of(amax, dtype) if scale is None else scale.float().reshape(())
    values = rows.flatten()[:: _stride(rows)].float()
    return torch.stack([amax, scale, *_shares(values, scale, dtype)])


def _shares(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the shares that saturate and that are flushed, of the values of `x` that are not 0."""
    reached = x.abs() * scale
    there = x != 0
    count = there.sum().clamp_min(1)
    saturated = (reached > _LARGEST_KEPT[dtype]).sum() / count
    flushed = ((reached <= _LARGEST_FLUSHED[dtype]) & there).sum() / count
    return saturated, flushed


def _stride(rows: Tensor) -> int:
    """Return which of the values to take. It shares no divisor with the channels, so that it meets each of them."""
    stride = max(1, rows.numel() // MOST)
    while math.gcd(stride, rows.shape[1]) > 1:
        stride += 1
    return stride


def _scales_of_blocks(rows: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Return each value's scale: that of its block of `width` values of its row, a power of two."""
    padded = F.pad(rows, (0, -rows.shape[1] % width))
    amax = padded.view(len(rows), -1, width).abs().amax(2)
    return _power_of_two(scale_of(amax, dtype)).repeat_interleave(width, dim=1)[:, : rows.shape[1]]


def _power_of_two(scale: Tensor) -> Tensor:
    """Round down to a power of two."""
    return torch.exp2(torch.log2(scale).floor())
