"""The state of delayed scaling as plain tensors: the scales and amax histories of every FP8 layer.

Transformer Engine keeps it in `module.fp8_meta["scaling_fwd" | "scaling_bwd"]` and allocates it in the first FP8
forward: `scale` [n] and `amax_history` [length, n], float32. The n tensors are input, weight and output of each GEMM
forward, and its two gradients backward. Row 0 of the history is being filled; the last row is the newest finished one.

The fused layers keep one such state for the whole model under `scales` (`layers.delayed_scaling`; newest row first).
Stateless recipes have no state, so the functions here do nothing for them.

Transformer Engine (2.20) updates its state twice in each micro-batch, and each time moves the history on by a row. At
the end of the forward, which ends its region, it uses the amaxes of activations and weights. At the end of the
backward, in the first layer, it uses those of gradients. So nothing is pending at the end of a step. The fused layers
update theirs once a step, at its first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.compat import transformer_engine
from gpt2_fp8.compat.torch_private import copy_all
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.runtime import collectives

DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_LARGEST = 2.0**100  # the largest scale or amax that a real tensor reaches


def scaling_states(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (layer.direction, TE's state object) of every layer that has run under delayed scaling."""
    for name, module in model.named_modules():
        for direction in DIRECTIONS:
            if (state := transformer_engine.scaling_state(module, direction)) is not None:
                yield f"{name}.{direction}", state


def capture(model: nn.Module) -> dict[str, Tensor]:
    """Copy every scale and history to the CPU, by `layer.direction.kind`. Empty before the first FP8 forward."""
    tensors = {}
    for name, state in scaling_states(model):
        tensors[f"{name}.scale"] = state.scale.detach().cpu().clone()
        tensors[f"{name}.amax_history"] = state.amax_history.detach().cpu().clone()
    return tensors


def why_not_usable(saved: dict[str, Tensor]) -> str | None:
    """Return why a captured state cannot quantize anything; None if it can.

    The reason is a scale or an amax that no tensor of a run has. An amax that is not finite is allowed: a run may have
    saved it, and it is ignored (`magnitudes.limited`).
    """
    for name, tensor in saved.items():
        values = tensor.double()
        if name.endswith(".scale"):
            odd = values[~((values >= 1 / _LARGEST) & (values <= _LARGEST))]  # NaN, too
            if odd.numel():
                return f"{name} has {odd[0].item():g}"
        elif (values.isfinite() & ((values < 0) | (values > _LARGEST))).any():
            return f"{name} has amaxes from {values.min().item():g} to {values.max().item():g}"
    return None


def restore(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Put a captured state back, in place.

    Call it inside `te.autocast` of the recipe under which the state was captured: layers that have not run yet allocate
    their state here. Raises KeyError or ValueError for a state of other layers.
    """
    for name, module in model.named_modules():
        key = f"{name}.scaling_fwd.scale"
        if key in saved:
            region = getattr(module, "fp8_region", nullcontext)()
            transformer_engine.allocate_scaling(module, saved[key].numel() // 3, region)
    for name, state in scaling_states(model):
        for kind, own in (("scale", state.scale), ("amax_history", state.amax_history)):
            given = saved[f"{name}.{kind}"]
            if (given.shape, given.dtype) != (own.shape, own.dtype):  # torch would broadcast or convert it
                there = f"{given.dtype} {tuple(given.shape)}"
                raise ValueError(
                    f"the FP8 state {name}.{kind} is {there}, and belongs to {own.dtype} {tuple(own.shape)}"
                )
            own.copy_(given)


def agree(model: nn.Module) -> None:
    """Give all ranks the same state: the largest of their amaxes, the smallest of their scales. Collective.

    It takes one all-reduce, at the end of a step or of a calibration. It does not run within a forward, as Transformer
    Engine's does (`reduce_amax`): a rank that runs out of memory would leave the others waiting there.

    Under Transformer Engine's layers, ranks' scales may differ from a step's second micro-batch on. Each rank takes
    them from its own text. The difference ends with the step, so rank 0's state in a checkpoint is that of all ranks.
    """
    states = [state for _, state in scaling_states(model)] if collectives.is_distributed() else []
    if not states:
        return
    histories, scales = [state.amax_history for state in states], [state.scale for state in states]
    flat = _flat([*histories, *scales])
    amaxes, negated = flat.split([sum(map(Tensor.numel, histories)), sum(map(Tensor.numel, scales))])
    # NaN has no order, so it becomes infinity, which has one. No scale is taken from either.
    amaxes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    negated.neg_()
    collectives.maximum(flat)
    negated.neg_()
    _put_apart(flat, [*histories, *scales])


def reset(model: nn.Module) -> None:
    """Set every scale to 1 and every amax to 0, in the layers that have a state."""
    for _, state in scaling_states(model):
        state.scale.fill_(1.0)
        state.amax_history.zero_()


def clear_histories(model: nn.Module) -> None:
    """Set every amax seen so far to 0; the scales stay."""
    for _, state in scaling_states(model):
        state.amax_history.zero_()


def update_scales(model: nn.Module) -> None:
    """Turn the amaxes seen so far into scales now. Transformer Engine's layers do so themselves after each pass."""
    for module in model.modules():
        if isinstance(module, Scales):
            module.update()


def divide_gradient_amaxes(model: nn.Module, factor: float) -> None:
    """Rescale the backward state from gradients of `factor` times the loss to gradients of the loss.

    This is exact for a power of two.
    """
    for name, state in scaling_states(model):
        if name.endswith("scaling_bwd"):
            state.amax_history.div_(factor)
            state.scale.mul_(factor)


def unchanged(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the histories on exit.

    TE records amaxes in evaluation too, and they would enter the next training update.
    """
    return _put_back([state.amax_history for _, state in scaling_states(model)])


def restored(model: nn.Module) -> AbstractContextManager[None]:
    """Restore scales and histories on exit, even after training passes."""
    return _put_back(_tensors(model))


def kept(model: nn.Module) -> Callable[[], None]:
    """Copy scales and histories, and return a function that puts them back. For a step that has to begin again.

    Unfinished passes have changed the histories. Transformer Engine's record of those passes is discarded too.
    """
    put_back, forget = _kept(_tensors(model)), transformer_engine.unfinished_passes()

    def begin_again() -> None:
        put_back()
        forget()

    return begin_again


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor for _, state in scaling_states(model) for tensor in (state.scale, state.amax_history)]


@contextmanager
def _put_back(tensors: list[Tensor]) -> Iterator[None]:
    put_back = _kept(tensors)
    try:
        yield
    finally:
        put_back()


def _kept(tensors: list[Tensor]) -> Callable[[], None]:
    """Copy `tensors` and return a function that puts the copies back. All go into one tensor: a model has hundreds."""
    if not tensors:
        return lambda: None
    flat = _flat(tensors)
    return lambda: _put_apart(flat, tensors)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _put_apart(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the elements of `flat` back into the tensors from which it was made."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    copy_all(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
