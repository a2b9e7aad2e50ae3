"""What is computed between two steps, without gradients: a validation's losses, a caller's forwards. Plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gpt2_fp8.engine.attempts import Attempts
from gpt2_fp8.engine.average import WeightAverage
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.engine.out_of_memory import Fitting
from gpt2_fp8.model.gpt2 import GPT2

log = logging.getLogger(__name__)


class Evaluation:
    """Evaluates a training step's model in the precision of validations. No amax is recorded.

    Args:
        attempts: finds the scales that FP8 needs, if it was never trained.
        gradients: computes.
        settle: finishes the last step, whose weights are meant. Collective.
        average: takes the place of these weights meanwhile.
    """

    def __init__(self, attempts: Attempts, gradients: Gradients, settle: Callable[[], object], average: WeightAverage):
        self._attempts, self._gradients, self._settle, self._average = attempts, gradients, settle, average
        self._batch: Fitting | None = None
        self._in_room_of_graphs = False

    def sums(self, ids: Tensor) -> Tensor:
        """Compute the sum of the losses of this rank's `ids` and the number of their targets: float64 [2]. Collective.

        ids: [sequences, n_positions + 1]. The model must be in evaluation mode.
        """
        self._settle()
        if not self._gradients.plan.evaluates_in_bf16:
            self._attempts.find_scales(ids)
        if self._batch is None:  # computing blocks again saves nothing without a backward
            place = self._gradients.exchange.place
            self._batch = Fitting(
                len(ids), "the batch of a validation", len(ids), saves="", ranks=place is not None, place=place
            )
        if self._in_room_of_graphs:
            self._gradients.release_graphs()

        def evaluate(size: int) -> Tensor:
            with self._average.in_place():
                return torch.stack([self._sums(part) for part in ids.split(size)]).sum(0)

        with self._gradients.scaling.unchanged():
            return self._batch(evaluate, self._room)

    def _sums(self, ids: Tensor) -> Tensor:
        count = (ids[:, 1:] >= 0).sum()
        total = self._gradients.evaluate(ids).double() * count
        return torch.stack([torch.where(count > 0, total, 0.0), count.double()])

    def _room(self) -> bool:
        """Free the CUDA graphs of training; return whether there were any. From then on every validation begins so."""
        if self._gradients.exchange.place is not None:
            self._gradients.exchange.give_up()
        if freed := self._gradients.release_graphs():
            self._in_room_of_graphs = True
            log.warning("no room for a validation beside training's CUDA graphs: they are recorded again after each")
        return freed

    @contextmanager
    def forwards(self) -> Iterator[GPT2]:
        """Enter evaluation mode for the caller's own forwards, without gradients, and return the model for them."""
        self._settle()
        model, unchanged = self._gradients.model, self._gradients.scaling.unchanged
        with (
            self._average.in_place(),
            in_mode(model, training=False),
            unchanged(),
            self._gradients.evaluation() as found,
        ):
            yield found


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode, and back into its own afterwards."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
