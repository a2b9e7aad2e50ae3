"""The backends: plain torch's layers, also with torchao's and with emulated products, TE's, and our own chain."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from typing_extensions import override

from gpt2_fp8.compat.flash_attn import NOT_INSTALLED
from gpt2_fp8.compat.torchao import Float8Product
from gpt2_fp8.config import backend_support
from gpt2_fp8.config.block_spec import Option, block_spec
from gpt2_fp8.config.kept_layers import every_block, parse_kept
from gpt2_fp8.config.schema import (
    AttentionKernel,
    AutoRecipe,
    DelayedRecipe,
    FP8PrecisionConfig,
    RunConfig,
    StatelessRecipe,
)
from gpt2_fp8.fp8.base import Backend, Device, Ran, compiles_plain
from gpt2_fp8.fp8.recipes import build_recipe, delayed_scaling, emulation, float8_config, region
from gpt2_fp8.fp8.support import (
    has_fp8_conversion,
    why_no_hopper,
    why_no_torchao,
    why_no_transformer_engine,
    why_not_te_fp8,
)
from gpt2_fp8.kernels import nvrtc, product
from gpt2_fp8.layers import attention, emulated, reference, te
from gpt2_fp8.layers.block import Composed, WithProducts
from gpt2_fp8.model.gpt2 import GPT2, padded_vocabulary
from gpt2_fp8.runtime.sharding import Sharding

SMALL_TOKENS = 65536  # tokens of the largest micro-batch for which CUDA graphs were measured, and were faster
_KEPT = "Transformer Engine's, in bf16"


class Reference(Backend):
    """The plain-torch layers, with which every other backend is compared.

    Attributes:
        recorded: whether `torch.compile` records CUDA graphs of its loss.
    """

    name = "reference"
    fused_loss = False

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        self.compiled = compiles_plain(config, device)
        self.recorded = self.compiled and device == "cuda" and config.compile_mode == "reduce-overhead"

    @override
    def own_recipe(self, auto: AutoRecipe) -> None:
        return None

    @override
    def family(self) -> Composed:
        return Composed(reference, self.recompute, self.kernel)

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        return {
            "layers": "plain torch" + (", compiled" if self.compiled else "") + (", recorded" if self.recorded else ""),
            "attention": self.torch_attention(),
        }


class Torchao(Backend):
    """The plain-torch layers with torchao's products. `torch.compile` fuses their casts with what is around them.

    Attributes:
        emulate: whether FP8 products are computed from FP8's numbers in high precision. No run does; tests on a CPU do.
    """

    name = "torchao"
    fused_loss = keeps_weights = False
    emulate: ClassVar[bool] = False

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        self.compiled = compiles_plain(config, device)

    @override
    def own_recipe(self, auto: AutoRecipe) -> StatelessRecipe:
        return StatelessRecipe(name="current")

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        return backend_support.why_not_torchao(config) or why_no_torchao()

    @override
    def family(self) -> Composed:
        assert self.recipe is not None
        configs = (float8_config(self.precision, self.recipe.name, head, self.emulate) for head in (False, True))
        # a backward in bfloat16 multiplies with the weight itself
        dtype = torch.bfloat16 if self.precision.backward == "bf16" else None
        block, head = (Float8Product(config, dtype) for config in configs)
        return WithProducts(block, head, self.recompute, self.kernel)

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        """See `Backend`. If faster layers were not chosen, it says why."""
        auto = self.config.precision.backend == "auto"
        reason = backend_support.why_not_te(self.config) or why_not_te_fp8() if auto else None
        how = ", compiled" if self.compiled else ""
        return {
            "layers": f"torchao's float8{how}" + (f", not Transformer Engine's: {reason}" if reason else ""),
            "attention": self.torch_attention(),
        }


class Emulated(Backend):
    """The plain-torch layers with operands cast to FP8 and back (`layers/emulated.py`)."""

    name = "emulated"
    fused_loss = False
    # Else Inductor leaves out bfloat16's rounding between operations that it fuses.
    compile_options: ClassVar[dict[str, Any]] = {"emulate_precision_casts": True}

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        able = device == "cuda" and has_fp8_conversion()
        self.compiled = able if config.compile == "auto" else config.compile

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        if config.compile is True:
            if not torch.cuda.is_available() and config.recipe.name == "block":
                # torch 2.13: the gradient of the packed queries, keys and values comes out wrong if n_embd is 64
                return "compile=true, and torch's compiler for CPUs computes blocks at the edge wrongly"
            if torch.cuda.is_available() and not has_fp8_conversion():
                name = torch.cuda.get_device_name()
                return f"compile=true, and {name} has no conversion to FP8 that can be compiled"
        return backend_support.why_not_emulated(config)

    @override
    def family(self) -> Composed:
        assert self.recipe is not None
        return emulated.Emulated(*emulation(self.precision, self.recipe), self.recompute, self.kernel)

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        how = ", compiled" if self.compiled else ""
        return {"layers": f"FP8 emulated in plain torch{how}", "attention": self.torch_attention()}


class TransformerEngine(Backend):
    """Transformer Engine's layers, of every recipe. Outside `te.autocast` they compute in bf16 and repeat a step."""

    name = "te"

    @override
    def own_recipe(self, auto: AutoRecipe) -> DelayedRecipe | StatelessRecipe:
        precision = self.config.precision
        in_bf16 = isinstance(precision, FP8PrecisionConfig) and precision.backward == "bf16"
        return StatelessRecipe(name="current") if in_bf16 else auto.delayed

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        return why_no_transformer_engine() or backend_support.why_not_te(config)

    @override
    def family(self) -> Composed:
        layers = te.split if backend_support.splits_mlp(self.config) else te
        return Composed(layers, self.recompute, self.kernel)

    @override
    def build(self, vocab_size: int, sharding: Sharding | None = None) -> GPT2:
        """See `Backend`. FP8 weights are kept whole from one micro-batch to the next, which is what FSDP saves."""
        self.keeps_weights = sharding is None
        return super().build(vocab_size, sharding)

    @override
    def fp8_region(self) -> AbstractContextManager:
        return region(self._recipe) if self.fp8 else nullcontext()

    @cached_property
    def _recipe(self) -> Any:
        """Transformer Engine's own recipe object."""
        assert self.recipe is not None
        return build_recipe(self.precision, self.recipe)

    @override
    def bf16_model(self, model: GPT2) -> GPT2:
        """See `Backend`. It is `model` itself: its layers compute in FP8 only in `fp8_region`."""
        return model

    @override
    def why_no_kernel(self, kernel: AttentionKernel) -> str | None:
        return None if kernel == "te" else super().why_no_kernel(kernel)

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        """See `Backend`. If the faster layers were not chosen, it says why."""
        reason = Fused.why_not(self.config) if self.config.precision.backend == "auto" else None
        own = self.kernel in ("auto", "te")
        return {
            "layers": "Transformer Engine" + (f", not the fused ones: {reason}" if reason else ""),
            "attention": "Transformer Engine's choice" if own else self.torch_attention(),
        }


class Fused(Backend):
    """Blocks and head in FP8, fused across the borders of layers (`layers/fused.py`), for delayed scaling on Hopper.

    It is the fastest backend there.
    """

    name = "fused"

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        small = config.micro_batch * config.model.n_positions <= SMALL_TOKENS
        self.graphs = small if config.cuda_graphs == "auto" else config.cuda_graphs

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        return backend_support.why_not_fused(config) or why_no_hopper() or nvrtc.why_missing()

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
        """See `Backend`. Each answer follows the function that decides: `product.fits`, `head.fit_without_logits`."""
        in_bf16, spec = parse_kept(self.keep_bf16, self.config.model.n_layer), block_spec(self.config.model)
        rows = (micro_batch or self.config.micro_batch) * self.config.model.n_positions
        why_apart = product.why_no_product(rows, spec.mlp.width, spec.n_embd)
        # Training's logits. Those of an evaluation are in bfloat16, and stored.
        why_stored = product.why_logits(rows, padded_vocabulary(vocab_size), spec.n_embd)
        parts = {
            spec.mlp.kind: _because("outside its GEMMs, in Triton", why_apart) if why_apart else "inside its GEMMs",
            "logits": _because("in memory", why_stored) if why_stored else "never in memory",
        }
        if in_bf16.head:
            parts["logits"] = _KEPT
        if every_block(in_bf16):
            parts[spec.mlp.kind] = _KEPT
        parts["attention"] = self._attention(of_te=every_block(in_bf16))
        return {"layers": f"fused FP8 chain{', in CUDA graphs' if self.graphs else ''}", **parts}

    def _attention(self, of_te: bool) -> str:
        """Name the kernels of attention, for people. `of_te`: all blocks are Transformer Engine's."""
        wanted = block_spec(self.config.model).options()
        before = " and ".join(option for option in (Option.QK_NORM, Option.ROPE) if option in wanted)
        return self._own_attention(of_te) + (f", after {before} in Triton" if before and not of_te else "")

    def _own_attention(self, of_te: bool) -> str:
        heads, tokens, _ = self.attention_shape
        if self.config.attention in ("sdpa", "math", "cudnn"):
            return self.torch_attention()
        if self.config.attention == "te" or (of_te and self.config.attention == "auto"):
            return "Transformer Engine's choice"
        if attention.has_torchs(heads, tokens):
            return _because(self.torch_attention(), attention.why_not_flash(heads, tokens))
        return _because(attention.kernels(heads), attention.why_not_flash(heads))

    def slower(self) -> str | None:
        """Return what is broken on this machine, so that slower kernels do its work."""
        reason = attention.why_no_flash()
        return None if reason == NOT_INSTALLED else reason


def _because(what: str, why: str | None) -> str:
    return what + (f" ({why})" if why else "")
