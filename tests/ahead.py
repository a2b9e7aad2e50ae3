"""Training with gradients ahead of a verdict and without, and what goes wrong in it: for any device."""

import math

from gpt2_fp8.fp8 import state


def nothing(step, number):
    pass


def not_finite(step, number):
    if number in (2, 3):
        step.model.tokens.weight.grad[0, 0] = math.nan


def jumped(step, number):
    if number == 3:
        for layer in state.scaling_states(step.model):
            layer.amax_history[0] = 1e30  # this step's own


def trained(step, batches, wrong, ahead):
    """Train; the numbers of the batches whose gradients were computed, and what was settled."""
    of_step, computed, settled = step.attempts._gradients.of_step, [], []

    def spoiled(text, size):
        loss = of_step(text, size)
        (number,) = (i for i, batch in enumerate(batches) if batch is text)
        computed.append(number)
        wrong(step, number)
        return loss

    step.attempts._gradients.of_step = spoiled
    step.on_settled.append(lambda result: settled.append(repr((result.read(), result.first, result.lr))))
    for batch in batches:
        step(batch)
        if not ahead:
            step.settle()
    step.settle()
    return computed, settled
