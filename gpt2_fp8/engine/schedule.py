"""The learning rate of each step: a linear warm-up, then one of four shapes.

A shape gives a part of the peak, from 1 to `min_lr_ratio`. Let m be `min_lr_ratio`, and x the part of the steps after
the warm-up that is done, 0 to 1:

    cosine                m + (1 - m) (1 + cos(pi x)) / 2    Loshchilov and Hutter 2017 (arXiv 1608.03983), eq. 5,
                                                             without restarts
    linear                1 - (1 - m) x                      Bergsma et al. 2025 (arXiv 2502.15938), who end at m = 0
    constant              1
    warmup_stable_decay   1, and 1 - (1 - m) y at the end    Hu et al. 2024 (arXiv 2404.06395), with the linear decay of
                                                             Hägele et al. 2024 (arXiv 2405.18392)

y is the part of the last `decay_steps` steps that is done. After the last step the rate stays where it is.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt2_fp8.config.schema import OptimConfig


def learning_rate_factor(step: int, config: OptimConfig, max_steps: int) -> float:
    """Compute the learning rate of a step (counted from 0), as a part of the peak.

    It rises linearly to the peak at `warmup_steps`, then follows `config.schedule` until `max_steps`, and stays there.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    floor = config.min_lr_ratio
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _done(step, config.warmup_steps, max_steps)))
    begin = config.warmup_steps if config.decay_steps is None else max_steps - config.decay_steps
    return 1 - (1 - floor) * _done(step, begin, max_steps)


def build_schedule(optimizer: Optimizer, config: OptimConfig, max_steps: int) -> LambdaLR:
    """Build `learning_rate_factor` as a torch scheduler, stepped once an optimizer step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, max_steps))


def _done(step: int, begin: int, end: int) -> float:
    """Return the part of the steps from `begin` to `end` that is done before `step`, 0 to 1."""
    return min(1.0, max(0, step - begin) / max(1, end - begin))
