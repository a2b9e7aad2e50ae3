"""A single absurd amax: it is noticed at the end of a step, and limited before it becomes a scale.

FP8 conversion saturates, so a flipped bit or one activation of 1e30 leaves a finite loss. But its amax would decide the
scale for the whole length of the history, and a tensor quantized with that scale is all zeros. One accident would
disturb many steps. So an amax counts for at most `JUMP` times the second largest of its history. A real change comes
again and then counts in full (up to `JUMP` times more each step).

Noticing takes a few kernel launches a step, on tensors of a few kilobytes. The host learns of it with the step's
verdict and acts only then. A run in which nothing jumps keeps every bit. A history of one step has nothing to compare
with: there an accident lasts one step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.fp8 import state
from gpt2_fp8.layers.delayed_scaling import LARGEST_SCALE

JUMP = 2.0**10


def limited(history: Tensor, new: slice) -> Tensor:
    """Copy `history`, float32 [rows, tensors], with the amaxes of the rows `new` limited.

    Each is at most `JUMP` times the second largest of its column, if that is not 0. One that is not finite becomes 0.
    """
    finite = history.nan_to_num(nan=0.0, posinf=0.0)
    if len(history) > 1:
        second = finite.topk(2, dim=0).values[1]
        finite[new] = torch.minimum(finite[new], torch.where(second > 0, second * JUMP, torch.inf))
    return finite


def absurd(model: nn.Module, micro_batches: int) -> Tensor | None:
    """Count the model's FP8 tensors that `limit` would change, float32 on the device; None without delayed scaling.

    Call it at the end of a step, after the ranks have agreed: it is then the same on all of them.
    """
    states = [it for _, it in state.scaling_states(model)]
    if not states:
        return None
    history = torch.cat([it.amax_history for it in states], dim=1)
    scale = torch.cat([it.scale for it in states])
    jumped = (limited(history, _new(states[0], micro_batches)) != history).any(0)
    return (jumped | (_represented(scale) != scale)).sum().float()


def limit(model: nn.Module, micro_batches: int) -> None:
    """Limit every history, and what was already taken from it.

    Transformer Engine's scales follow their amaxes within the step; the fused layers' follow at the next step's first
    forward.
    """
    for name, it in state.scaling_states(model):
        before = it.amax_history.clone()
        it.amax_history.copy_(limited(before, _new(it, micro_batches)))
        if (recipe := _recipe(it)) is not None:
            jumped = (it.amax_history != before).any(0)
            it.scale.copy_(torch.where(jumped, _scale(it, recipe, name.endswith("scaling_fwd")), it.scale))
        it.scale.copy_(_represented(it.scale))


def _recipe(state: Any) -> Any:
    """Return Transformer Engine's recipe of a state; None for the fused layers' state."""
    return getattr(state, "recipe", None)


def _new(state: Any, micro_batches: int) -> slice:
    """Return the rows with a step's own amaxes.

    For the fused layers that is the first row. For Transformer Engine it is the last `micro_batches` rows.
    """
    return slice(0, 1) if _recipe(state) is None else slice(-micro_batches, None)


def _scale(state: Any, recipe: Any, forward: bool) -> Tensor:
    """Compute the scales [tensors] that Transformer Engine takes from its histories (`DelayedScaling`'s docstring)."""
    history, limits = state.amax_history, recipe.fp8_format.value
    amax = history[-1] if recipe.amax_compute_algo == "most_recent" else history.amax(0)
    fresh = (limits.max_fwd if forward else limits.max_bwd) / amax / 2.0**recipe.margin
    return torch.where(amax > 0, fresh, state.scale)


def _represented(scale: Tensor) -> Tensor:
    return scale.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
