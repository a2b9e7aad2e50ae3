"""Transformer Engine's state of delayed scaling, which is private. Holds for `transformer-engine>=2.20.2,<2.22`.

Its public way to save it, `get_extra_state`, is a pickle that it refuses to load since 2.18 (TransformerEngine#3123).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn


def scaling_state(module: nn.Module, direction: str) -> Any | None:
    """Return a layer's state of delayed scaling: `scale` [n] and `amax_history` [length, n], both float32.

    `direction` is "scaling_fwd" or "scaling_bwd". None: there is none, or none yet.
    """
    state = getattr(module, "fp8_meta", {}).get(direction)
    return state if hasattr(state, "amax_history") else None


def allocate_scaling(module: Any, products: int, region: AbstractContextManager[Any]) -> None:
    """Make a layer's state of so many GEMMs now, as its first FP8 forward would, if it has none.

    Call it inside `te.autocast`. `region`: the context that the forward enters within the outer region.
    """
    if "scaling_fwd" not in module.fp8_meta:
        with region:
            module.init_fp8_metadata(num_gemms=products)


def entered_recipe() -> Any | None:
    """Return the recipe of the `te.autocast` around this call; None if there is none, or if it is off."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None


def split_along_dim() -> Any:
    """Return the autograd function that splits a packed tensor: `apply(tensor, dim, sizes)`.

    The backward of torch's views copies (14 ms of a 186 ms step), and so does that of the public `qkv_layer=`.
    """
    from transformer_engine.pytorch.utils import SplitAlongDim

    return SplitAlongDim


def apply_rotary() -> Any:
    """Return the function that turns queries or keys by RoPE, in one kernel. Its module has no public name."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    return apply_rotary_pos_emb


def computed_twice() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a forward and of the same forward again in its backward, for torch's `checkpoint`.

    The first has each layer keep its scales and amaxes, the second compute with these, in the region of the first.
    """
    from transformer_engine.pytorch.distributed import activation_recompute_forward as phase
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    region = FP8GlobalStateManager.get_autocast_state()
    return phase(activation_recompute=True), _in_region(region, phase(activation_recompute=True, recompute_phase=True))


@contextmanager
def _in_region(region: Any, phase: AbstractContextManager[Any]) -> Iterator[None]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    outside = FP8GlobalStateManager.get_autocast_state()
    try:
        with phase:  # it sets which layer is the region's first, from a queue of forwards; a backward comes in reverse
            FP8GlobalStateManager.set_autocast_state(region)
            yield
    finally:
        FP8GlobalStateManager.set_autocast_state(outside)


def reset() -> None:
    """Forget what Transformer Engine remembers of the models of this process."""
    if "transformer_engine.pytorch" in sys.modules:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


def unfinished_passes() -> Callable[[], None]:
    """Return a function that forgets the forwards from here on whose backward never comes.

    Call both outside of regions. If a layer is computed again in the backward, the scales of each forward wait in a
    queue: with one too many, every later backward would take another forward's. An error in such a backward leaves its
    region set: bf16 layers would then compute in FP8.
    """
    if "transformer_engine.pytorch" not in sys.modules:
        return lambda: None
    from transformer_engine.pytorch.distributed import activation_recompute_forward
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    region = FP8GlobalStateManager.get_autocast_state()

    def forget() -> None:
        FP8GlobalStateManager.set_autocast_state(region)
        activation_recompute_forward._is_first_fp8_module.clear()
        for waiting in FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer:
            waiting.clear()

    return forget
