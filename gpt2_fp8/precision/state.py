"""The state of delayed scaling, as plain tensors: of every FP8 layer, its scales and the history of its amaxes.

Transformer Engine keeps it in `module.fp8_meta["scaling_fwd" | "scaling_bwd"]`, allocated in the first FP8 forward:
`scale` [n] and `amax_history` [length, n], float32, n tensors (input, weight and output of each product; its two
gradients). Row 0 of the history is the slot being filled, the last row the newest finished one. The fused layers keep
one such state for the whole model, under `scales` (`layers.scales`; the rows in the other order). The stateless recipes
have neither, and everything here finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.layers.scales import Scales

DIRECTIONS = ("scaling_fwd", "scaling_bwd")


def _states(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(layer.direction, TE's state object) of every layer that has run under delayed scaling."""
    for name, module in model.named_modules():
        for direction in DIRECTIONS:
            state = getattr(module, "fp8_meta", {}).get(direction)
            if hasattr(state, "amax_history"):
                yield f"{name}.{direction}", state


def capture(model: nn.Module) -> dict[str, Tensor]:
    """Copies of every scale and history on the CPU, by `layer.direction.kind`. Empty before the first FP8 forward."""
    tensors = {}
    for name, state in _states(model):
        tensors[f"{name}.scale"] = state.scale.detach().cpu().clone()
        tensors[f"{name}.amax_history"] = state.amax_history.detach().cpu().clone()
    return tensors


def restore(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Put a captured state back, in place. Call inside `te.autocast` of the recipe under which it was captured: layers
    that have not run yet allocate their state here."""
    for name, module in model.named_modules():
        key = f"{name}.scaling_fwd.scale"
        if key in saved and "scaling_fwd" not in module.fp8_meta:
            module.init_fp8_metadata(num_gemms=saved[key].numel() // 3)
    for name, state in _states(model):
        state.scale.copy_(saved[f"{name}.scale"])
        state.amax_history.copy_(saved[f"{name}.amax_history"])


def clear_histories(model: nn.Module) -> None:
    """Forget every amax seen so far; the scales stay."""
    for _, state in _states(model):
        state.amax_history.zero_()


def forget_nonfinite(model: nn.Module) -> None:
    """Let magnitudes that are not finite count for nothing, as in a step that is run again in bf16. Scales are never
    taken from them, but as long as Transformer Engine has one in a history it keeps the scale as it is."""
    for _, state in _states(model):
        state.amax_history.nan_to_num_(nan=0.0, posinf=0.0)


def update_scales(model: nn.Module) -> None:
    """Turn the amaxes seen so far into scales now. Transformer Engine's layers do so by themselves after each pass."""
    for module in model.modules():
        if isinstance(module, Scales):
            module.update()


def divide_gradient_amaxes(model: nn.Module, factor: float) -> None:
    """Rescale the backward state from gradients of `factor` times the loss to gradients of the loss. Exact for a power
    of two."""
    for name, state in _states(model):
        if name.endswith("scaling_bwd"):
            state.amax_history.div_(factor)
            state.scale.mul_(factor)


def unchanged(model: nn.Module) -> AbstractContextManager[None]:
    """Leave the histories as they were found: TE records amaxes in evaluation too, and they would enter the next
    training update."""
    return _put_back([state.amax_history for _, state in _states(model)])


def restored(model: nn.Module) -> AbstractContextManager[None]:
    """Leave scales and histories as they were found, also where training passes run in between."""
    return _put_back([tensor for _, state in _states(model) for tensor in (state.scale, state.amax_history)])


@contextmanager
def _put_back(tensors: list[Tensor]) -> Iterator[None]:
    kept = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        if kept:
            torch._foreach_copy_(tensors, kept)
