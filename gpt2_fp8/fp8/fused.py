"""Our own chain of FP8 kernels, for delayed scaling on Hopper. It is the fastest backend there."""

from __future__ import annotations

from typing_extensions import override

from gpt2_fp8.config import backend_support
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.kept_layers import every_block, kept
from gpt2_fp8.config.schema import AttentionKernel, AutoRecipe, DelayedRecipe, FP8PrecisionConfig, RunConfig
from gpt2_fp8.fp8.base import Backend, Device, Ran
from gpt2_fp8.fp8.recipes import delayed_scaling
from gpt2_fp8.fp8.support import why_no_hopper, why_no_transformer_engine
from gpt2_fp8.layers import Family
from gpt2_fp8.model.gpt2 import padded_vocabulary

SMALL_TOKENS = 65536  # tokens of the largest micro-batch for which CUDA graphs were measured, and were faster
_KEPT = "Transformer Engine's, in bf16"


class Fused(Backend):
    """Blocks and head in FP8, fused across the borders of layers (`layers/fused.py`)."""

    name = "fused"
    records_graphs = True

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        small = config.micro_batch * config.model.n_positions <= SMALL_TOKENS
        self.graphs = small if config.cuda_graphs == "auto" else config.cuda_graphs

    @override
    def own_recipe(self, auto: AutoRecipe) -> DelayedRecipe:
        return auto.delayed

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        return backend_support.why_not_fused(config) or why_no_hopper()

    @override
    def family(self) -> Family:
        from gpt2_fp8.layers.fused_family import Fused as Layers  # imports Triton

        precision = self.config.precision
        assert isinstance(precision, FP8PrecisionConfig)
        assert isinstance(self.recipe, DelayedRecipe)
        return Layers(delayed_scaling(precision, self.recipe), self.recompute, self.kernel)

    @override
    def head_factor(self, rows: int, columns: int) -> float:
        from gpt2_fp8.layers.chosen import head_factor

        return head_factor(rows, columns, self.config.model.n_embd)

    @override
    def why_not_attention(self, kernel: AttentionKernel) -> str | None:
        if kernel == "flash":
            from gpt2_fp8.layers.attention import why_not_flash

            heads, tokens, _ = self.attention_shape
            return why_not_flash(heads, tokens)
        return why_no_transformer_engine() if kernel == "te" else super().why_not_attention(kernel)

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        from gpt2_fp8.layers.chosen import chosen

        in_bf16 = kept(self.keep_bf16, self.config.model.n_layer)
        rows = (micro_batch or self.config.micro_batch) * self.config.model.n_positions
        parts = chosen(rows, block_spec(self.config.model), padded_vocabulary(vocab_size))
        if in_bf16.head:
            parts["logits"] = _KEPT
        if every_block(in_bf16):
            parts["gelu"] = _KEPT
        parts["attention"] = self._attention(of_te=every_block(in_bf16))
        return {"layers": f"fused FP8 chain{', in CUDA graphs' if self.graphs else ''}", **parts}

    def _attention(self, of_te: bool) -> str:
        """Name the kernels of attention, for people. `of_te`: all blocks are Transformer Engine's."""
        from gpt2_fp8.layers import attention

        heads, tokens, _ = self.attention_shape
        if self.config.attention in ("sdpa", "math", "cudnn"):
            return self.torch_attention()
        if self.config.attention == "te" or (of_te and self.config.attention == "auto"):
            return "Transformer Engine's choice"
        if attention.has_torchs(heads, tokens):
            return f"{self.torch_attention()} ({attention.why_not_flash(heads, tokens)})"
        why_not = attention.why_not_flash(heads)
        return attention.kernels(heads) + (f" ({why_not})" if why_not else "")

    @override
    def slower(self) -> list[str]:
        from gpt2_fp8.layers.chosen import slower

        return slower()
