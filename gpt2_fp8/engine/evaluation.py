"""What is computed between two steps, without gradients: a validation's losses, a caller's forwards. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from gpt2_fp8.engine.attempts import Attempts
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.engine.micro_batching import MicroBatching
from gpt2_fp8.model.gpt2 import GPT2


class Evaluation:
    """Evaluates a training step's model in the precision of validations. No amax is recorded.

    Args:
        attempts: finds the scales that FP8 needs, if it was never trained.
        gradients, batching: compute.
        settle: finishes the last step, whose weights are meant. Collective.
    """

    def __init__(self, attempts: Attempts, gradients: Gradients, batching: MicroBatching, settle: Callable[[], object]):
        self._attempts, self._gradients, self._batching, self._settle = attempts, gradients, batching, settle

    def sums(self, ids: Tensor) -> Tensor:
        """Compute the sum of the losses of `ids` and the number of their targets: float64 [2]. Collective.

        ids: [sequences, n_positions + 1]. The model must be in evaluation mode.
        """
        self._settle()
        if not self._gradients.plan.evaluates_in_bf16:
            self._attempts.find_scales(ids)
        with self._gradients.scaling.unchanged():
            return self._batching.evaluate(ids)

    @contextmanager
    def forwards(self) -> Iterator[GPT2]:
        """Enter evaluation mode for the caller's own forwards, without gradients, and return the model for them."""
        self._settle()
        model = self._gradients.model
        with in_mode(model, training=False), self._gradients.scaling.unchanged(), self._gradients.evaluation() as found:
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
