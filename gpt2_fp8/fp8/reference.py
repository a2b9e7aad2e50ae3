"""Plain torch: fp32 and bf16 on any device, under `torch.compile` on a GPU."""

from __future__ import annotations

from typing_extensions import override

from gpt2_fp8.config.block_spec import block_spec, why_not
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.fp8.base import Backend, Device, Ran
from gpt2_fp8.layers import Family, reference
from gpt2_fp8.layers.block import Composed


class Reference(Backend):
    """The plain-torch layers, with which every other backend is compared."""

    name = "reference"
    fused_loss = False

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        self.compiled = self.compiles_plain
        self.recorded = self.compiled and device == "cuda" and config.compile_mode == "reduce-overhead"

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        return why_not(block_spec(config.model), reference.NAME, reference.OFFERS)

    @override
    def family(self) -> Family:
        return Composed(reference, self.recompute, self.kernel)

    @property
    @override
    def label(self) -> str:
        return ("recorded" if self.recorded else "compiled") if self.compiled else "plain"

    @override
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        return {
            "layers": "plain torch" + (", compiled" if self.compiled else "") + (", recorded" if self.recorded else ""),
            "attention": self.torch_attention(),
        }
