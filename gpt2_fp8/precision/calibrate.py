"""The scales of delayed scaling before the first update.

Delayed scaling takes a tensor's scale from earlier steps; in the first step every scale is 1. The gradient of a mean
loss over 65,536 tokens is then far below E5M2's smallest number (2^-16). Every gradient is rounded to 0, the layers
below see an amax of 0, and the first steps train nothing (measured: a gradient norm of exactly 0).

So one micro-batch is run twice without an update, with the loss times a power of two near the number of tokens. Each
token's gradient is then of order 1, which E5M2 holds unscaled. The first pass finds the amaxes; the second refines them
under real scales. Then the gradients' amaxes are divided by the same power of two, which is exact. They are also
divided by the number of micro-batches in a training step, which is exact for a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gpt2_fp8.precision import state

PASSES = 2


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
    state.reset(model)  # a calibration that ran out of memory may have left some
    with torch.random.fork_rng(devices=devices):
        for _ in range(PASSES):
            state.clear_histories(model)
            with autocast():
                loss = loss_of(ids)
            (loss * factor).backward()
            model.zero_grad(set_to_none=True)
            state.update_scales(model)
    state.divide_gradient_amaxes(model, factor / share)
