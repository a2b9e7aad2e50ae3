"""Lightning's precision plugins, with the autocast around each micro-batch's forward alone.

Lightning wraps a whole `training_step` in `train_step_context`. With manual optimization that step holds several
forwards, backwards and the update; Transformer Engine wants each forward in a region of its own, since leaving the
region is what updates the scales, and backward outside of it. So `train_step_context` does nothing here and the module
enters `forward_context` itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn

from gpt2_fp8.config.schema import AutoRecipe, DelayedRecipe, FP8PrecisionConfig, RunConfig
from gpt2_fp8.precision import state
from gpt2_fp8.precision.recipes import build_recipe
from gpt2_fp8.precision.resolve import Plan
from gpt2_fp8.runtime import collectives

log = logging.getLogger(__name__)


class BF16Precision(MixedPrecision):
    """float32 weights under bfloat16 autocast."""

    def __init__(self, device: str):
        super().__init__("bf16-mixed", device)

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Nothing: see the module."""
        yield


class FP8Precision(BF16Precision):
    """float32 weights, bfloat16 activations, FP8 products. Holds delayed scaling's state for the checkpoint.

    `recipe` is Transformer Engine's; None for the fused layers, which need no region. `scaling` says under what
    settings delayed scaling's scales are found; a checkpoint's that were found under others are not taken. None: a
    stateless recipe, which needs no calibration. `global_batch_size`: sequences a step, of all ranks. A rank's
    gradients are those of the mean over its own share of them, and so are their magnitudes.
    """

    def __init__(self, recipe: Any, scaling: str | None, global_batch_size: int = 1):
        super().__init__("cuda")
        self.recipe, self.scaling, self.global_batch_size = recipe, scaling, global_batch_size
        self._model: nn.Module | None = None
        self.scales_found = False  # by a checkpoint or a calibration: before that, there is nothing worth saving
        self._pending: dict[str, Any] = {}

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """bfloat16 autocast and FP8 autocast, for one forward."""
        import transformer_engine.pytorch as te

        fp8 = te.autocast(enabled=True, recipe=self.recipe) if self.recipe is not None else nullcontext()
        with self.autocast_context_manager(), fp8:
            yield

    def bf16_context(self) -> AbstractContextManager[None]:
        """bfloat16 autocast alone, for a forward of a step that is run again: no layer of Transformer Engine uses FP8
        in it."""
        return super().forward_context()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Nothing to convert: the model was built of FP8 layers. Remembers it for the state."""
        self._model = module
        return module

    def restore_scales(self) -> bool:
        """Give the layers the scales of the checkpoint. False if there are none, or none of these settings: calibrate.
        Those of gradients follow where a rank's share of a step is another now (ranks, or the global batch).

        Called once, before the first forward, with the model on its device.
        """
        pending, self._pending = self._pending, {}
        if self._model is None or self.scaling is None or pending.pop("scaling", None) != self.scaling:
            return False
        sequences = pending.pop("sequences", self._sequences)  # not in checkpoints of before it was kept
        if reason := state.why_not_usable(pending):
            log.warning("the checkpoint's FP8 scales are not taken, and found anew: %s", reason)
            return False
        with self.forward_context():
            state.restore(self._model, pending)
        if sequences != self._sequences:
            state.divide_gradient_amaxes(self._model, self._sequences / sequences)
        self.scales_found = True
        return True

    @property
    def _sequences(self) -> int:
        """That a rank computes in a step."""
        return self.global_batch_size // collectives.rank_and_world()[1]

    def state_dict(self) -> dict[str, Any]:
        """Delayed scaling's scales and histories as CPU tensors, and its settings; empty for the other recipes."""
        if self._model is None or self.scaling is None or not self.scales_found:
            return dict(self._pending)
        return {"scaling": self.scaling, "sequences": self._sequences, **state.capture(self._model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the checkpoint's state until the layers are on their device."""
        self._pending = dict(state_dict)


def build_plugin(config: RunConfig, plan: Plan) -> Precision:
    """The plugin of a run, for `Trainer(plugins=[...])`."""
    if plan.fp8:
        assert isinstance(config.precision, FP8PrecisionConfig)
        settings = f"{config.precision.name}, {config.recipe}, {sorted(config.precision.keep_bf16)}, {plan.backend}"
        scaling = settings if isinstance(config.recipe, DelayedRecipe) else None
        assert not isinstance(config.recipe, AutoRecipe)  # settled before a run is built
        recipe = None if plan.backend == "fused" else build_recipe(config.precision, config.recipe)
        return FP8Precision(recipe, scaling, config.global_batch_size)
    return BF16Precision(plan.device) if plan.ran == "bf16" else Precision()  # float32
