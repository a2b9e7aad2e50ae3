"""FP8 emulated in plain torch, on any device: to see what FP8 does. It is never the fastest."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from typing_extensions import override

from gpt2_fp8.config import backend_support
from gpt2_fp8.config.schema import AutoRecipe, DelayedRecipe, FP8PrecisionConfig, RunConfig
from gpt2_fp8.fp8.base import Backend, Device, Ran
from gpt2_fp8.fp8.fp8_tensors import HEAD, FP8Tensor
from gpt2_fp8.fp8.recipes import delayed_scaling, formats
from gpt2_fp8.fp8.support import has_fp8_conversion
from gpt2_fp8.layers import Family, emulated
from gpt2_fp8.layers.emulated import Emulation


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
        if config.compile is True:
            if not torch.cuda.is_available() and config.recipe.name == "block":
                # torch 2.13: the gradient of the packed queries, keys and values comes out wrong if n_embd is 64
                return "compile=true, and torch's compiler for CPUs computes blocks at the edge wrongly"
            if torch.cuda.is_available() and not has_fp8_conversion():
                name = torch.cuda.get_device_name()
                return f"compile=true, and {name} has no conversion to FP8 that can be compiled"
        return backend_support.why_not_emulated(config)

    @override
    def family(self) -> Family:
        precision, recipe = self.config.precision, self.recipe
        assert isinstance(precision, FP8PrecisionConfig)
        assert recipe is not None
        assert recipe.name != "mxfp8"
        assert recipe.name != "rowwise"
        how = Emulation(recipe.name, *formats(precision), precision.backward)
        delayed = delayed_scaling(precision, recipe) if isinstance(recipe, DelayedRecipe) else None
        return emulated.Emulated(how, delayed, self.recompute, self.kernel)

    @override
    def fp8_tensors(self) -> list[FP8Tensor]:
        return [tensor for tensor in super().fp8_tensors() if tensor.layer != HEAD]

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        how = ", compiled" if self.compiled else ""
        return {"layers": f"FP8 emulated in plain torch{how}", "attention": self.torch_attention()}
