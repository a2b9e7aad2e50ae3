"""Our own chain of FP8 kernels, for delayed scaling on Hopper. It is the fastest backend there."""

from __future__ import annotations

from typing_extensions import override

from gpt2_fp8.compat.flash_attn import NOT_INSTALLED
from gpt2_fp8.config import backend_support
from gpt2_fp8.config.block_spec import BlockSpec, block_spec
from gpt2_fp8.config.kept_layers import every_block, kept
from gpt2_fp8.config.schema import AttentionKernel, DelayedRecipe, RunConfig
from gpt2_fp8.fp8.base import Backend, Device, Ran
from gpt2_fp8.fp8.recipes import delayed_scaling
from gpt2_fp8.fp8.support import why_no_hopper, why_no_transformer_engine
from gpt2_fp8.kernels import nvrtc, product
from gpt2_fp8.layers import attention
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import padded_vocabulary

SMALL_TOKENS = 65536  # tokens of the largest micro-batch for which CUDA graphs were measured, and were faster
_KEPT = "Transformer Engine's, in bf16"


class Fused(Backend):
    """Blocks and head in FP8, fused across the borders of layers (`layers/fused.py`)."""

    name = "fused"

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        small = config.micro_batch * config.model.n_positions <= SMALL_TOKENS
        self.graphs = small if config.cuda_graphs == "auto" else config.cuda_graphs

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        return backend_support.why_not_fused(config) or why_no_hopper()

    @override
    def family(self) -> Composed:
        from gpt2_fp8.layers.fused import Fused as Layers  # imports Triton

        assert isinstance(self.recipe, DelayedRecipe)
        return Layers(delayed_scaling(self.precision, self.recipe), self.recompute, self.kernel)

    @override
    def why_no_kernel(self, kernel: AttentionKernel) -> str | None:
        if kernel == "flash":
            heads, tokens, _ = self.attention_shape
            return attention.why_not_flash(heads, tokens)
        return why_no_transformer_engine() if kernel == "te" else super().why_no_kernel(kernel)

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        in_bf16 = kept(self.keep_bf16, self.config.model.n_layer)
        rows = (micro_batch or self.config.micro_batch) * self.config.model.n_positions
        parts = describe_kernels(rows, block_spec(self.config.model), padded_vocabulary(vocab_size))
        if in_bf16.head:
            parts["logits"] = _KEPT
        if every_block(in_bf16):
            parts["gelu"] = _KEPT
        parts["attention"] = self._attention(of_te=every_block(in_bf16))
        return {"layers": f"fused FP8 chain{', in CUDA graphs' if self.graphs else ''}", **parts}

    def _attention(self, of_te: bool) -> str:
        """Name the kernels of attention, for people. `of_te`: all blocks are Transformer Engine's."""
        heads, tokens, _ = self.attention_shape
        if self.config.attention in ("sdpa", "math", "cudnn"):
            return self.torch_attention()
        if self.config.attention == "te" or (of_te and self.config.attention == "auto"):
            return "Transformer Engine's choice"
        if attention.has_torchs(heads, tokens):
            return f"{self.torch_attention()} ({attention.why_not_flash(heads, tokens)})"
        why_not = attention.why_not_flash(heads)
        return attention.kernels(heads) + (f" ({why_not})" if why_not else "")

    def slower(self) -> list[str]:
        """List what is missing or broken on this machine, so that slower kernels do its work."""
        flash = attention.why_no_flash()
        return [reason for reason in (nvrtc.missing(), None if flash == NOT_INSTALLED else flash) if reason]


def describe_kernels(rows: int, spec: BlockSpec, padded_vocab_size: int) -> dict[str, str]:
    """Describe the kernel of each part of the fused layers but attention, by the part, and why not a faster one.

    Each answer follows the function that decides: `product.fits`, `head.fit_without_logits`, `layer_norm.keeps_rows`.

    `rows`: of a micro-batch, sequences times tokens. `padded_vocab_size`: rows of the embedding.
    """
    missing, n_embd = nvrtc.missing() is not None, spec.n_embd
    why_no_gelu = product.why_no_product(rows, spec.mlp.width, n_embd)
    gelu = _because("outside its GEMMs, in Triton", why_no_gelu) if why_no_gelu or missing else "inside its GEMMs"
    # Training's logits. Those of an evaluation are in bfloat16, and stored.
    why_no_statistics = product.why_no_product(rows, padded_vocab_size, n_embd)
    if missing or why_no_statistics:
        logits = _because("without their statistics", why_no_statistics)
    elif why_stored := product.why_logits(rows, padded_vocab_size, n_embd):
        logits = _because("with their statistics", why_stored)
    else:
        logits = "never in memory"
    if missing or n_embd > nvrtc.WIDEST_COLUMNS:
        norm = "in Triton, over tiles" + ("" if missing else f" (rows are wider than {nvrtc.WIDEST_COLUMNS:,})")
    else:
        norm = "in CUDA C++, over rows"
    casts = f"in {'Triton' if missing else 'CUDA C++'}"
    return {"gelu": gelu, "logits": logits, "normalisation": norm, "casts": casts}


def _because(what: str, why: str | None) -> str:
    return what + (f" ({why})" if why else "")
