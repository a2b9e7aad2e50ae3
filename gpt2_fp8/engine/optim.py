"""AdamW, its parameter groups, and the check of a saved state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from gpt2_fp8.config.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Build fused AdamW. Only matrices have weight decay; biases and normalisation weights have one dimension.

    Parameters are ordered by name, so that a checkpoint's optimizer state fits any family of layers.
    """
    named = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def check_moments(optimizer: AdamW, saved: dict[str, Any], step: int) -> None:
    """Raise ValueError unless a saved optimizer state can have come from `step` updates of these parameters.

    Every tensor must have its parameter's shape and the right dtype: torch accepts any, and its fused kernels trust
    them. The numbers must be finite, since an update whose gradient is not finite is left out. A mean of gradients is
    bounded by the root of the mean of their squares, whatever the gradients were (`_most_ratio`).
    """
    named = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {index: parameter.shape for index, parameter in zip(named, parameters, strict=True)}
    ratio = max(_most_ratio(*group["betas"]) for group in [*optimizer.param_groups, *_with_betas(saved)])
    if not saved["state"] or not saved["state"].keys() <= shapes.keys():
        raise ValueError(f"the optimizer state is of {len(saved['state'])} parameters, and the model has {len(shapes)}")
    for index, moments in saved["state"].items():
        for name, shape in (("exp_avg", shapes[index]), ("exp_avg_sq", shapes[index]), ("step", torch.Size())):
            if (found := moments[name].shape) != shape:
                raise ValueError(f"the optimizer's {name} {index} is {tuple(found)}, and belongs to {tuple(shape)}")
            if (dtype := moments[name].dtype) != torch.float32:
                raise ValueError(f"the optimizer's {name} {index} is of {dtype}, not of float32")
        mean, squares = moments["exp_avg"], moments["exp_avg_sq"]
        if (squares < 0).any():
            raise ValueError(f"the optimizer's exp_avg_sq {index}, a mean of squares, has numbers below 0")
        if not (torch.isfinite(mean).all() and torch.isfinite(squares).all()):
            raise ValueError(f"the optimizer's exp_avg or exp_avg_sq {index} is not finite")
        if (mean.abs() > squares.sqrt() * ratio + _UNDERFLOWN).any():
            raise ValueError(
                f"the optimizer's exp_avg {index} reaches {mean.abs().max().item():.3g}, but exp_avg_sq of at most "
                f"{squares.max().item():.3g} says that no gradient was so large"
            )
        updates = moments["step"].item()
        if not (0 <= updates <= step and updates == int(updates)):
            raise ValueError(f"the optimizer's step {index} is {updates}, in a state of {step} steps")


_UNDERFLOWN = 1e-15  # larger than any gradient whose square is 0 in float32, by a wide margin


def _most_ratio(beta1: float, beta2: float) -> float:
    """Return a bound of |exp_avg| / sqrt(exp_avg_sq), from the Cauchy-Schwarz inequality, times a hundred.

    The factor of a hundred allows for other betas earlier in the run. Infinity if squares are forgotten before
    gradients.
    """
    forgotten = 1 - beta1**2 / beta2 if beta2 else 0.0
    return 100 * max(1.0, (1 - beta1) / math.sqrt((1 - beta2) * forgotten)) if forgotten > 1e-6 else math.inf


def _with_betas(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of a saved state whose betas are given as numbers below 1."""

    def are_parts(betas: Any) -> bool:
        return type(betas) in (tuple, list) and len(betas) == 2 and all(type(b) is float and 0 <= b < 1 for b in betas)

    return [group for group in saved["param_groups"] if are_parts(group.get("betas"))]
