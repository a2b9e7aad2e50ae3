"""The owner of a model's FP8 scales: it finds the first ones, undoes them with a step, and saves them.

Only delayed scaling keeps scales between steps. `fp8.state` says where they are kept, and what an absurd amax may do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.config.schema import DelayedRecipe, FP8PrecisionConfig, RunConfig
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.recipes import Recipe
from gpt2_fp8.runtime import collectives

PASSES = 2


log = logging.getLogger(__name__)

Context = Callable[[], AbstractContextManager]
Undo = Callable[[], None]


class FP8Scaling:
    """What a training step asks of a model's scales.

    Args:
        model: on its device, or not there yet; it has scales from its first FP8 forward on.
        settings: what decides the scales of delayed scaling, in words. A checkpoint's scales are taken only if
            its settings were the same. None: a recipe without stored scales, which needs no calibration.
        sequences: how many a rank computes in a step. Its gradients, and so their amaxes, are of the mean over them.
        context: the forward context under which layers allocate their state.

    Attributes:
        ready: whether forwards may run: scales were found, or none are needed.
    """

    def __init__(self, model: nn.Module, settings: str | None, sequences: int, context: Context):
        self.model, self.settings, self.sequences, self.context = model, settings, sequences, context
        self.ready = settings is None
        self._saved: dict[str, Any] = {}  # a checkpoint's state, until the layers are on their device

    @classmethod
    def of_run(
        cls, model: nn.Module, config: RunConfig, recipe: Recipe | None, backend: str, context: Context
    ) -> FP8Scaling:
        """Return the scales of a run's model, which `backend` computes."""
        precision = config.precision
        assert isinstance(precision, FP8PrecisionConfig)
        settings = f"{precision.name}, {recipe}, {sorted(precision.keep_bf16)}, {backend}"
        share = config.global_batch_size // collectives.rank_and_world()[1]
        return cls(model, settings if isinstance(recipe, DelayedRecipe) else None, share, context)

    @classmethod
    def of_nothing(cls) -> FP8Scaling:
        """Return the scales of a model in which nothing is scaled."""
        return cls(nn.Module(), None, 1, nullcontext)

    def take(self) -> bool:
        """Give the layers the checkpoint's scales. Returns False if there are none, or only of other settings.

        Call it before the first forward, with the model on its device. Raises KeyError or ValueError for a state of
        other layers.
        """
        if self.settings is None:
            return True
        saved, self._saved = self._saved, {}
        if "settings" not in saved:
            return False
        if saved.pop("settings") != self.settings:
            log.info("the checkpoint's FP8 scales are of other settings, and new ones are found")
            return False
        sequences = saved.pop("sequences", self.sequences)  # older checkpoints do not have it
        with self.context():
            state.restore(self.model, saved)
        if sequences != self.sequences:  # a rank's share of a step has changed
            state.divide_gradient_amaxes(self.model, self.sequences / sequences)
        self.ready = True
        return True

    def calibrate(self, loss_of: Callable[[Tensor], Tensor], ids: Tensor) -> None:
        """Find the first scales from one micro-batch. For the arguments see `fp8.scaling.calibrate`."""
        calibrate(self.model, loss_of, ids, self.context, share=len(ids) / self.sequences)

    def remember(self) -> Undo:
        """Copy scales and histories, and return a function that puts them back, for a step that begins again."""
        return state.kept(self.model)

    def trial(self) -> Undo:
        """Return a function that forgets the scales found meanwhile: training finds its own, or a checkpoint's."""
        if self.ready:
            return lambda: None
        saved = self.state_dict()

        def undo() -> None:
            self.ready = False
            self.load_state_dict(saved)

        return undo

    def agree(self) -> None:
        """Give all ranks the same state. Collective: see `state.agree`."""
        state.agree(self.model)

    def absurd(self, micro_batches: int) -> Tensor | None:
        """Count the FP8 tensors whose amax has jumped in a step; None without stored scales. See `state.absurd`."""
        return state.absurd(self.model, micro_batches)

    def limit(self, micro_batches: int) -> None:
        """Keep such amaxes from becoming scales. Call it before the next forward."""
        state.limit(self.model, micro_batches)

    def unchanged(self) -> AbstractContextManager:
        """Keep the histories unchanged by forwards that are not training."""
        return state.unchanged(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return scales and histories as CPU tensors, and what decided them; {} without stored scales."""
        if self.settings is None:
            return {}
        if not self.ready:  # before the first forward, the checkpoint's state is the newest
            return dict(self._saved)
        return {"settings": self.settings, "sequences": self.sequences, **state.capture(self.model)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep a checkpoint's state until `take`."""
        self._saved = dict(saved)


def calibrate(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    ids: Tensor,
    autocast: Callable[[], AbstractContextManager],
    share: float = 1.0,
) -> None:
    """Set every scale of `model` from one micro-batch.

    ids: [micro-batch, tokens + 1]; `loss_of(ids)` is the mean loss over its targets. `share`: the micro-batch's part of
    a step's sequences; training will multiply its loss by it. Gradients are None afterwards, and the random number
    generators are as before. Under a stateless recipe nothing lasting happens. Each rank calibrates with its own text;
    ranks agree afterwards (`state.agree`).
    """
    factor = 2.0 ** math.ceil(math.log2(ids[:, 1:].numel()))
    devices = [ids.device] if ids.is_cuda else []
    state.reset(model)  # a calibration that ran out of memory may have left other scales
    with torch.random.fork_rng(devices=devices):
        for _ in range(PASSES):
            state.clear_histories(model)
            with autocast():
                loss = loss_of(ids)
            (loss * factor).backward()
            model.zero_grad(set_to_none=True)
            state.update_scales(model)
    state.divide_gradient_amaxes(model, factor / share)
