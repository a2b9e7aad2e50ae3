"""FP8 emulated in plain torch, on any device: to see what FP8 does, operand by operand. It is never the fastest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from typing_extensions import override

from gpt2_fp8.backends.base import Backend, Device, Ran
from gpt2_fp8.config import backend_support, emulation
from gpt2_fp8.config.precision_schema import OF_HEAD, AutoRecipe, DelayedRecipe, FP8PrecisionConfig
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.layers import Family, emulated, emulated_probabilities
from gpt2_fp8.layers.emulated_gemm import Emulation
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.precision.fp8_tensors import KINDS, FP8Tensor, Kind, fp8_tensors
from gpt2_fp8.precision.recipes import delayed_scaling, formats
from gpt2_fp8.precision.scaling import FP8Scaling, Scaling
from gpt2_fp8.precision.support import has_fp8_conversion


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

    @override
    def own_recipe(self, auto: AutoRecipe) -> DelayedRecipe:
        return auto.delayed

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        if config.compile is True and (reason := cls._why_not_compiled(config)):
            return f"compile=true, and {reason}"
        return backend_support.why_not_emulated(config)

    @staticmethod
    def _why_not_compiled(config: RunConfig) -> str | None:
        if not torch.cuda.is_available():
            # torch 2.13: the gradient of the packed queries, keys and values comes out wrong if n_embd is 64
            wrong = "torch's compiler for CPUs computes blocks at the edge wrongly"
            return wrong if config.recipe.name == "block" else None
        if has_fp8_conversion():
            return None
        return f"{torch.cuda.get_device_name()} has no conversion to FP8 that can be compiled"

    @property
    def switches(self) -> list[str]:
        """The operands that are emulated in layers that are not kept in bf16, in the order of `EMULATABLE`."""
        assert isinstance(self.config.precision, FP8PrecisionConfig)
        return emulation.switches(self.config.precision)

    @override
    def family(self) -> Family:
        precision = self.config.precision
        assert isinstance(precision, FP8PrecisionConfig)
        assert self.recipe is not None
        assert self.recipe.name != "mxfp8"
        assert self.recipe.name != "rowwise"
        forward, gradient = formats(precision)
        how = Emulation(self.recipe.name, forward, gradient, frozenset(self.switches), precision.backward)
        delayed = delayed_scaling(precision, self.recipe) if isinstance(self.recipe, DelayedRecipe) else None
        return emulated.Emulated(how, delayed, self.recompute, self.kernel)

    def scaling(self, model: GPT2) -> Scaling:
        """See `Backend`. Scales that were found with other operands are not taken from a checkpoint."""
        name = f"{self.name} {self.switches}"
        return FP8Scaling.of_run(model, self.config, self.recipe, name, self.forward_context)

    @override
    def head_factor(self, rows: int, columns: int) -> float:
        return emulated_probabilities.UNIT

    @override
    def fp8_tensors(self) -> list[FP8Tensor]:
        precision, switches = self.config.precision, self.switches
        assert isinstance(precision, FP8PrecisionConfig)
        of_head = [name for name in switches if name.startswith(OF_HEAD)]
        blocks, head = (_kinds(names) for names in (set(switches) - set(of_head), of_head))
        return fp8_tensors(precision, self.config.model.n_layer, blocks, KINDS if "head" in switches else head)

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        assert isinstance(self.config.precision, FP8PrecisionConfig)
        how = ", compiled" if self.compiled else ""
        effective = emulation.effective(self.config.precision, self.config.model.n_layer)
        return {
            "layers": f"FP8 emulated in plain torch{how}",
            "emulated": ", ".join(effective) or "nothing",
            "attention": self.torch_attention(),
        }


def _kinds(switches: Collection[str]) -> list[Kind]:
    return [kind for kind in KINDS if any(name.endswith(kind) for name in switches)]
