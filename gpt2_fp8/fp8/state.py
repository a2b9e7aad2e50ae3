"""The state of delayed scaling: the scales and amax histories of every FP8 layer, and what is done to all of them.

The fused and the emulated layers keep one for the whole model under `scales` (`layers.delayed_scaling`). It is updated
once a step, at its first forward. Stateless recipes have none, so the functions here do nothing for them.

Transformer Engine keeps one a layer and direction and allocates it in the first FP8 forward. The tensors are input,
weight and output of each GEMM forward, and its two gradients backward. TE (2.20) updates its state twice in each
micro-batch, and each time moves the history on by a row. At the end of the forward, which ends its region, it uses the
amaxes of activations and weights. At the end of the backward, in the first layer, it uses those of gradients. So
nothing is pending at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.compat import transformer_engine
from gpt2_fp8.compat.torch_private import copy_all
from gpt2_fp8.layers.delayed_scaling import Scales

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"  # the last part of a state's name


@dataclass(frozen=True)
class ScalingState:
    """The scales of some FP8 tensors of one direction, and their amaxes of past steps, the newest first.

    Attributes:
        name: of its owner and direction, in checkpoints: blocks.0.qkv.scaling_fwd.
        scale: float32 [tensors].
        amax_history: float32 [steps, tensors].
    """

    name: str
    scale: Tensor
    amax_history: Tensor

    def rows_of_step(self, micro_batches: int) -> slice:
        """Return the rows of the history that a step of `micro_batches` has just filled."""
        return slice(0, 1)

    def newest_first(self, history: Tensor) -> Tensor:
        """Return the finished rows of a history of this kind, the newest first."""
        return history

    def rescale(self, changed: Tensor) -> None:
        """Take the scales of `changed` tensors from their history again, if they have followed it already."""


@dataclass(frozen=True)
class TEState(ScalingState):
    """That of a layer of Transformer Engine's: row 0 of the history is being filled, the last row is the newest."""

    recipe: Any

    def rows_of_step(self, micro_batches: int) -> slice:
        """See `ScalingState`."""
        return slice(-micro_batches, None)

    def newest_first(self, history: Tensor) -> Tensor:
        """See `ScalingState`."""
        return history[1:].flip(0) if len(history) > 1 else history

    def rescale(self, changed: Tensor) -> None:
        """See `ScalingState`. The formula is in `DelayedScaling`'s docstring."""
        recipe, history, limits = self.recipe, self.amax_history, self.recipe.fp8_format.value
        amax = history[-1] if recipe.amax_compute_algo == "most_recent" else history.amax(0)
        largest = limits.max_fwd if self.name.endswith(FORWARD) else limits.max_bwd
        fresh = torch.where(amax > 0, largest / amax / 2.0**recipe.margin, self.scale)
        self.scale.copy_(torch.where(changed, fresh, self.scale))


def states_of(module: nn.Module, name: str = "") -> dict[str, ScalingState]:
    """Return the states that a module itself keeps, by direction; {} before its first FP8 forward, or if it has none.

    `name`: the module's. Ask each time: Transformer Engine may have put another state in the place of one.
    """
    if isinstance(module, Scales):
        names = {"forward": FORWARD, "gradient": BACKWARD}
        return {names[way]: ScalingState(f"{name}.{names[way]}", *parts) for way, parts in module.views().items()}
    found = {way: transformer_engine.scaling_state(module, way) for way in (FORWARD, BACKWARD)}
    return {
        way: TEState(f"{name}.{way}", kept.scale, kept.amax_history, getattr(kept, "recipe", None))
        for way, kept in found.items()
        if kept is not None
    }


def scaling_states(model: nn.Module) -> Iterator[ScalingState]:
    """Yield the states of every layer that has run under delayed scaling."""
    for name, module in model.named_modules():
        yield from states_of(module, name).values()


def capture(model: nn.Module) -> dict[str, Tensor]:
    """Copy every scale and history to the CPU, by `layer.direction.kind`. Empty before the first FP8 forward."""
    tensors = {}
    for state in scaling_states(model):
        tensors[f"{state.name}.scale"] = state.scale.detach().cpu().clone()
        tensors[f"{state.name}.amax_history"] = state.amax_history.detach().cpu().clone()
    return tensors


def restore(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Put a captured state back, in place.

    Call it inside `te.autocast` of the recipe under which the state was captured: layers that have not run yet allocate
    their state here. Raises KeyError or ValueError for a state of other layers.
    """
    for name, module in model.named_modules():
        key = f"{name}.{FORWARD}.scale"
        if key in saved and not isinstance(module, Scales):
            region = getattr(module, "fp8_region", nullcontext)()
            transformer_engine.allocate_scaling(module, saved[key].numel() // 3, region)
    for state in scaling_states(model):
        for kind, own in (("scale", state.scale), ("amax_history", state.amax_history)):
            given = saved[f"{state.name}.{kind}"]
            if (given.shape, given.dtype) != (own.shape, own.dtype):  # torch would broadcast or convert it
                there = f"{given.dtype} {tuple(given.shape)}"
                belongs = f"{own.dtype} {tuple(own.shape)}"
                raise ValueError(f"the FP8 state {state.name}.{kind} is {there}, and belongs to {belongs}")
            own.copy_(given)


def allocate(layers: Iterable[nn.Module]) -> None:
    """Make the state of Transformer Engine's linear layers now: scales of 1, no amaxes. Call it where `restore` is."""
    for layer in layers:
        transformer_engine.allocate_scaling(layer, 1, getattr(layer, "fp8_region", nullcontext)())


def divide_gradient_amaxes(model: nn.Module, factor: float) -> None:
    """Rescale the backward state from gradients of `factor` times the loss to gradients of the loss.

    This is exact for a power of two.
    """
    for state in scaling_states(model):
        if state.name.endswith(BACKWARD):
            state.amax_history.div_(factor)
            state.scale.mul_(factor)


def unchanged(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the histories on exit.

    TE records amaxes in evaluation too, and they would enter the next training update.
    """
    return _put_back([state.amax_history for state in scaling_states(model)])


def restored(model: nn.Module) -> AbstractContextManager[None]:
    """Restore scales and histories on exit, even after training passes."""
    return _put_back(_tensors(model))


def remember(model: nn.Module) -> Callable[[], None]:
    """Copy scales and histories, and return a function that puts them back."""
    return _copy(_tensors(model))


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor for state in scaling_states(model) for tensor in (state.scale, state.amax_history)]


@contextmanager
def _put_back(tensors: list[Tensor]) -> Iterator[None]:
    put_back = _copy(tensors)
    try:
        yield
    finally:
        put_back()


def _copy(tensors: list[Tensor]) -> Callable[[], None]:
    """Copy `tensors` and return a function that puts the copies back. All go into one tensor: a model has hundreds."""
    if not tensors:
        return lambda: None
    flat = flatten(tensors)
    return lambda: unflatten(flat, tensors)


def flatten(tensors: list[Tensor]) -> Tensor:
    """Copy all elements into one tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the elements of `flat` back into the tensors from which it was made."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    copy_all(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
