"""Whether a saved optimizer state can have come from updates of these parameters.

Digests show only that a state is what somebody wrote. torch accepts any tensor, and its fused kernels trust them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt2_fp8.engine.muon import MuonAdamW
from gpt2_fp8.engine.small_adamw import SmallAdamW

_UNDERFLOWN = 1e-15  # larger than any gradient whose square is 0 in float32, by a wide margin


def check_moments(optimizer: Optimizer, saved: dict[str, Any], step: int) -> None:
    """Raise ValueError unless a saved optimizer state can have come from `step` updates of these parameters.

    Every tensor must be one that this optimizer has, with the right shape and dtype. The numbers must be finite, since
    an update whose gradient is not finite is left out. A mean of gradients is bounded by the root of the mean of their
    squares, whatever the gradients were (`_most_ratio`).
    """
    named = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {index: _state_of(optimizer, parameter) for index, parameter in zip(named, parameters, strict=True)}
    with_betas = [group for group in optimizer.param_groups if "betas" in group]
    ratio = max(_most_ratio(*group["betas"]) for group in [*with_betas, *_with_betas(saved)])
    if saved["state"].keys() != own.keys():  # every parameter has a gradient in each step
        raise ValueError(f"the optimizer state is of {len(saved['state'])} parameters, and the model has {len(own)}")
    for index, moments in saved["state"].items():
        _check_tensors(index, moments, own[index])
        if "momentum_buffer" in moments:  # Muon makes it orthogonal, so its size does not matter
            if not torch.isfinite(moments["momentum_buffer"]).all():
                raise ValueError(f"the optimizer's momentum_buffer {index} is not finite")
            continue
        _check_bound(index, moments, ratio)
        updates = moments["step"].item()
        if not (0 <= updates <= step and updates == int(updates)):
            raise ValueError(f"the optimizer's step {index} is {updates}, in a state of {step} steps")


def _state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and dtypes that an optimizer keeps for a parameter, without memory."""
    like = torch.empty_like(parameter, device="meta")
    if isinstance(optimizer, SmallAdamW):
        return optimizer.new_state(like)
    if isinstance(optimizer, MuonAdamW) and any(parameter is matrix for matrix in optimizer.matrices):
        return {"momentum_buffer": like}
    return {"exp_avg": like, "exp_avg_sq": like, "step": torch.empty((), device="meta")}


def _check_tensors(index: int, found: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    for name, like in own.items():
        if name not in found:
            raise ValueError(f"the optimizer's {name} {index} is missing")
        if found[name].shape != like.shape:
            shapes = tuple(found[name].shape), tuple(like.shape)
            raise ValueError(f"the optimizer's {name} {index} is {shapes[0]}, and belongs to {shapes[1]}")
        if found[name].dtype != like.dtype:
            wanted = str(like.dtype).removeprefix("torch.")
            raise ValueError(f"the optimizer's {name} {index} is of {found[name].dtype}, not of {wanted}")
    if others := found.keys() - own.keys():
        raise ValueError(f"the optimizer has no {min(map(str, others))[:40]!r} {index}")


def _check_bound(index: int, moments: dict[str, Tensor], ratio: float) -> None:
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


def _most_ratio(beta1: float, beta2: float) -> float:
    """Return a bound of |exp_avg| / sqrt(exp_avg_sq), from the Cauchy-Schwarz inequality, times a hundred.

    The factor of a hundred allows for other betas earlier in the run. Infinity if squares are forgotten before
    gradients.
    """
    forgotten = 1 - beta1**2 / beta2 if beta2 else 0.0
    return 100 * max(1.0, (1 - beta1) / math.sqrt((1 - beta2) * forgotten)) if forgotten > 1e-6 else math.inf


def _with_betas(saved: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the groups of a saved state whose betas are given as numbers below 1."""

    def are_parts(betas: Any) -> bool:
        return type(betas) in (tuple, list) and len(betas) == 2 and all(type(b) is float and 0 <= b < 1 for b in betas)

    yield from (group for group in saved["param_groups"] if are_parts(group.get("betas")))
