"""Transformer Engine's modules: every FP8 recipe, and bf16 outside an FP8 region."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

from typing_extensions import override

from gpt2_fp8.config import backend_support
from gpt2_fp8.config.block_spec import block_spec, why_not
from gpt2_fp8.config.schema import (
    AttentionKernel,
    AutoRecipe,
    DelayedRecipe,
    FP8PrecisionConfig,
    RunConfig,
    StatelessRecipe,
)
from gpt2_fp8.fp8.base import Backend
from gpt2_fp8.fp8.recipes import build_recipe, region
from gpt2_fp8.fp8.support import why_no_transformer_engine
from gpt2_fp8.layers import Family, te, te_split
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2


class TransformerEngine(Backend):
    """Transformer Engine's layers. Outside `te.autocast` they compute in bf16 and can so repeat a step."""

    name = "te"

    @override
    def own_recipe(self, auto: AutoRecipe) -> DelayedRecipe | StatelessRecipe:
        precision = self.config.precision
        in_bf16 = isinstance(precision, FP8PrecisionConfig) and precision.backward == "bf16"
        return StatelessRecipe(name="current") if in_bf16 else auto.delayed

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        lacking = why_not(block_spec(config.model), te.NAME, te.OFFERS)
        return why_no_transformer_engine() or backend_support.why_not_te(config) or lacking

    @override
    def family(self) -> Family:
        layers = te_split if backend_support.splits_mlp(self.config) else te
        return Composed(layers, self.recompute, self.kernel)

    @override
    def fp8_region(self) -> AbstractContextManager:
        return region(self._recipe) if self.fp8 else nullcontext()

    @cached_property
    def _recipe(self) -> Any:
        """Transformer Engine's own recipe object."""
        assert isinstance(self.config.precision, FP8PrecisionConfig)
        assert self.recipe is not None
        return build_recipe(self.config.precision, self.recipe)

    @override
    def bf16_model(self, model: GPT2) -> GPT2:
        """See `Backend`. It is `model` itself: its layers compute in FP8 only in `fp8_region`."""
        return model

    @override
    def why_no_kernel(self, kernel: AttentionKernel) -> str | None:
        return None if kernel == "te" else super().why_no_kernel(kernel)

    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        """See `Backend`. If the faster layers were not chosen because of the settings, it says so."""
        precision = self.config.precision
        auto = isinstance(precision, FP8PrecisionConfig) and precision.backend == "auto"
        reason = backend_support.why_not_fused(self.config) if auto else None
        own = self.kernel in ("auto", "te")
        return {
            "layers": "Transformer Engine" + (f", not the fused ones: {reason}" if reason else ""),
            "attention": "Transformer Engine's choice" if own else self.torch_attention(),
        }
