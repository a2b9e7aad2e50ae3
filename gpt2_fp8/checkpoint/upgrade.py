"""The keys of a run's state in earlier formats, changed to the present ones.

Format 3 put the state of a training step under one key, and renamed two callbacks:

    FP8Precision.scaling      training_step.scaling.settings
    FP8Precision.*            training_step.scaling.*
    micro_batch_size          training_step.micro_batch_size
    callbacks.Tiers           callbacks.Checkpointing
    callbacks.Fallback        callbacks.DivergenceGuard
"""

from __future__ import annotations

from typing import Any

_CALLBACKS = {"Tiers": "Checkpointing", "Fallback": "DivergenceGuard"}


def upgraded(skeleton: dict[str, Any]) -> dict[str, Any]:
    """Return a state's skeleton with the keys of the present format. One that has them already stays as it is.

    Values may be a stranger's: they are moved, and not read.
    """
    state, step = dict(skeleton), {}
    if "micro_batch_size" in state:
        step["micro_batch_size"] = state.pop("micro_batch_size")
    if "FP8Precision" in state:
        scaling = state.pop("FP8Precision")
        if isinstance(scaling, dict) and "scaling" in scaling:
            scaling = {"settings" if key == "scaling" else key: value for key, value in scaling.items()}
        step["scaling"] = scaling
    if step and "training_step" not in state:
        state["training_step"] = step
    if isinstance(callbacks := state.get("callbacks"), dict):
        state["callbacks"] = {_CALLBACKS.get(name, name): value for name, value in callbacks.items()}
    return state
