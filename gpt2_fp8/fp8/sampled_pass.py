"""A forward and backward of a few sequences in a bf16 twin of the model, which observes every FP8 tensor on its way.

It is the same for all backends. The twin shares the parameters, and computes in bf16 what the FP8 layers compute. So
inputs and gradients are nearly those of the run, and weights are exactly those. Each is quantized as the run does it.

Nothing of the run changes: no gradient is left in a parameter, no scale or history is written, no random number is
drawn (the twin has no dropout), and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.fp8.base import Backend, twin_of
from gpt2_fp8.fp8.fp8_tensors import HEAD, FP8Tensor
from gpt2_fp8.fp8.quantized import Recipe, figures
from gpt2_fp8.model import penalty as penalties
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.loss import loss_of

Observe = Callable[[str, str, Tensor], None]


class SampledPass:
    """Observes the FP8 tensors of `model`, which `backend` computes. Its twin is built at the first call."""

    def __init__(self, backend: Backend, model: GPT2):
        assert backend.recipe is not None
        self.backend, self.model = backend, model
        self.recipe: Recipe = backend.recipe.name
        self.tensors = backend.fp8_tensors()
        self._by_name: dict[tuple[str, str], FP8Tensor] = {
            (tensor.layer, tensor.kind): tensor for tensor in self.tensors
        }
        self._twin: GPT2 | None = None
        self._observe: Observe = _nothing

    def __call__(
        self, ids: Tensor, share: int, micro_batch: int, scales: Mapping[FP8Tensor, Tensor]
    ) -> dict[FP8Tensor, Tensor]:
        """Return the figures of each tensor that was met: float32 [4] on the device, as `fp8.quantized` has them.

        Args:
            ids: int32 [sequences, n_positions + 1]; -1 is padding.
            share: sequences that a rank computes in a step: gradients are of the mean over these.
            micro_batch: sequences that the run computes at once; these here may be fewer.
            scales: float32 scalars of the tensors whose scale is stored.
        """
        given = dict(scales)
        factor = self.backend.head_factor(micro_batch * (ids.shape[1] - 1), self.model.tokens.num_embeddings)
        if (head := self._by_name.get((HEAD, "gradient"))) and factor is not None:
            targets = torch.count_nonzero(ids[:, 1:] >= 0).clamp_min(1)
            given[head] = factor * targets * (share / len(ids))
        found: dict[FP8Tensor, Tensor] = {}

        def observe(layer: str, kind: str, x: Tensor) -> None:
            if (tensor := self._by_name.get((layer, kind))) is not None:
                found[tensor] = figures(x, tensor.dtype, self.recipe, given.get(tensor))

        self._observe = observe
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._go(ids, len(ids) / share)
        finally:
            self._observe = _nothing
        return found

    def _go(self, ids: Tensor, scale: float) -> None:
        twin, start = self._built(), []
        hook = twin.blocks[0].register_forward_pre_hook(lambda _, given: start.append(given[0]))
        try:
            with self.backend.bf16_context():
                loss = loss_of(twin, ids, None, scale, ids.is_cuda, self.backend.config.penalty)
        finally:
            hook.remove()
        # Of the start of the residual stream alone: no parameter's gradient is computed, or touched.
        torch.autograd.grad(penalties.trained(loss), start[0])

    def _built(self) -> GPT2:
        if self._twin is None:
            self._twin = twin_of(self.model, self.backend.recompute).eval()
            for i, block in enumerate(self._twin.blocks):
                layers: Any = block
                layers.qkv.product = self._product(f"blocks.{i}.qkv")
                layers.projection.product = self._product(f"blocks.{i}.projection")
                layers.mlp.fc1_product = self._product(f"blocks.{i}.fc1")
                layers.mlp.fc2_product = self._product(f"blocks.{i}.fc2")
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


def _nothing(layer: str, kind: str, x: Tensor) -> None:
    """Observe nothing."""
