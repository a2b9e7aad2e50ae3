"""torchao's float8 on the plain-torch layers, under `torch.compile`: FP8 where Transformer Engine is not."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from gpt2_fp8.config import backend_support
from gpt2_fp8.config.block_spec import block_spec, why_not
from gpt2_fp8.config.schema import AutoRecipe, FP8PrecisionConfig, RunConfig, StatelessRecipe
from gpt2_fp8.fp8.base import Backend, Device, Ran
from gpt2_fp8.fp8.recipes import float8_config, weight_dtype
from gpt2_fp8.fp8.scaling import Scaling
from gpt2_fp8.fp8.support import why_no_torchao, why_not_rowwise, why_not_te_fp8
from gpt2_fp8.layers import Family, torchao
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2


class Torchao(Backend):
    """The plain-torch layers with torchao's products (`layers/torchao.py`).

    Attributes:
        emulate: whether FP8 products are computed from FP8's numbers in high precision. No run does; tests on a CPU do.
    """

    name = "torchao"
    fused_loss = False
    emulate: ClassVar[bool] = False

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        super().__init__(config, ran, device)
        self.compiled = self.compiles_plain

    @override
    def own_recipe(self, auto: AutoRecipe) -> StatelessRecipe:
        return StatelessRecipe(name="current")

    @classmethod
    @override
    def why_not(cls, config: RunConfig) -> str | None:
        lacking = why_not(block_spec(config.model), torchao.Layers.NAME, torchao.Layers.OFFERS)
        rowwise = why_not_rowwise() if config.recipe.name == "rowwise" else None
        return backend_support.why_not_torchao(config) or lacking or why_no_torchao() or rowwise

    @override
    def family(self) -> Family:
        precision = self.config.precision
        assert isinstance(precision, FP8PrecisionConfig)
        assert self.recipe is not None
        block, head = (float8_config(precision, self.recipe.name, head, self.emulate) for head in (False, True))
        return Composed(torchao.Layers(block, head, weight_dtype(precision)), self.recompute, self.kernel)

    def loss(
        self, model: GPT2, ids: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0,
        targets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `Backend`. No weight is kept in FP8 between micro-batches, so `torch.compile` makes one graph."""
        return super().loss(model, ids, None, scale, targets)

    def scaling(self, model: GPT2) -> Scaling:
        """See `Backend`. No scale outlives its product."""
        return Scaling()

    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        """See `Backend`. If faster layers were not chosen, it says why."""
        precision = self.config.precision
        auto = isinstance(precision, FP8PrecisionConfig) and precision.backend == "auto"
        reason = backend_support.why_not_te(self.config) or why_not_te_fp8() if auto else None
        how = ", compiled" if self.compiled else ""
        return {
            "layers": f"torchao's float8{how}" + (f", not Transformer Engine's: {reason}" if reason else ""),
            "attention": self.torch_attention(),
        }
