"""The owner of a model's FP8 scales: it finds the first ones, undoes them with a step, limits outliers, and saves them.

Only delayed scaling keeps scales between steps. `fp8.state` says where they are kept.

**Amax outliers.** FP8 conversion saturates, so a flipped bit or one activation of 1e30 leaves a finite loss. But its
amax would decide the scale for the whole length of the history, and a tensor quantized with that scale is all zeros. So
an amax counts for at most `JUMP` times the second largest of its history. A real change comes again and then counts in
full (up to `JUMP` times more each step). The host learns of it with the step's verdict and acts only then (`limit`): a
run in which nothing jumps keeps every bit. In a history of one step, an accident lasts one step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.compat import transformer_engine
from gpt2_fp8.fp8 import state
from gpt2_fp8.layers.delayed_scaling import LARGEST_SCALE, Scales
from gpt2_fp8.runtime import collectives

PASSES = 2
JUMP = 2.0**10

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
        """Copy scales and histories, and return a function that puts them back, for a step that begins again.

        Unfinished passes have changed the histories. Transformer Engine's record of those passes is discarded too.
        """
        put_back, forget = state.remember(self.model), transformer_engine.unfinished_passes()

        def begin_again() -> None:
            put_back()
            forget()

        return begin_again

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
        """Give all ranks the same state: the largest of their amaxes, the smallest of their scales. Collective.

        It takes one all-reduce, at the end of a step or of a calibration. It does not run within a forward, as
        Transformer Engine's does (`reduce_amax`): a rank that runs out of memory would leave the others waiting there.

        Under Transformer Engine's layers, ranks' scales may differ from a step's second micro-batch on. Each rank takes
        them from its own text. The difference ends with the step, so rank 0's state in a checkpoint is that of all.
        """
        states = list(state.scaling_states(self.model)) if collectives.is_distributed() else []
        if not states:
            return
        histories, scales = [each.amax_history for each in states], [each.scale for each in states]
        flat = state.flatten([*histories, *scales])
        amaxes, negated = flat.split([sum(map(Tensor.numel, histories)), sum(map(Tensor.numel, scales))])
        # NaN has no order, so it becomes infinity, which has one. No scale is taken from either.
        amaxes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        negated.neg_()
        collectives.maximum(flat)
        negated.neg_()
        state.unflatten(flat, [*histories, *scales])

    def count_amax_outliers(self, micro_batches: int) -> Tensor | None:
        """Count the FP8 tensors that `limit` would change, float32 on the device; None without stored scales.

        Call it at the end of a step, after the ranks have agreed: it is then the same on all of them.
        """
        states = list(state.scaling_states(self.model))
        if not states:
            return None
        history = torch.cat([each.amax_history for each in states], dim=1)
        scale = torch.cat([each.scale for each in states])
        jumped = (limit_amaxes(history, states[0].rows_of_step(micro_batches)) != history).any(0)
        return (jumped | (_clamp(scale) != scale)).sum().float()

    def limit(self, micro_batches: int) -> None:
        """Limit every history, and what was already taken from it. Call it before the next forward."""
        for each in state.scaling_states(self.model):
            before = each.amax_history.clone()
            each.amax_history.copy_(limit_amaxes(before, each.rows_of_step(micro_batches)))
            each.rescale((each.amax_history != before).any(0))
            each.scale.copy_(_clamp(each.scale))

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
    ranks agree afterwards (`FP8Scaling.agree`).
    """
    factor = 2.0 ** math.ceil(math.log2(ids[:, 1:].numel()))
    devices = [ids.device] if ids.is_cuda else []
    for each in state.scaling_states(model):  # a calibration that ran out of memory may have left other scales
        each.scale.fill_(1.0)
    with torch.random.fork_rng(devices=devices):
        for _ in range(PASSES):
            for each in state.scaling_states(model):
                each.amax_history.zero_()
            with autocast():
                loss = loss_of(ids)
            (loss * factor).backward()
            model.zero_grad(set_to_none=True)
            for module in model.modules():  # Transformer Engine's layers do so themselves after each pass
                if isinstance(module, Scales):
                    module.update()
    state.divide_gradient_amaxes(model, factor / share)


def limit_amaxes(history: Tensor, new: slice) -> Tensor:
    """Copy `history`, float32 [rows, tensors], with the amaxes of the rows `new` limited.

    Each is at most `JUMP` times the second largest of its column, if that is not 0. One that is not finite becomes 0.
    """
    finite = history.nan_to_num(nan=0.0, posinf=0.0)
    if len(history) > 1:
        second = finite.topk(2, dim=0).values[1]
        finite[new] = torch.minimum(finite[new], torch.where(second > 0, second * JUMP, torch.inf))
    return finite


def _clamp(scale: Tensor) -> Tensor:
    return scale.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
