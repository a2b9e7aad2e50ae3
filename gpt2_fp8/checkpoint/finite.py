"""Whether a checkpoint's weights are numbers at all. A run leaves out every update that would make them anything else.

What is not finite in a checkpoint was put there, by a fault of the hardware or by a person, and spoils every step from
it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.checkpoint.load import look_at_weights, read_weights
from gpt2_fp8.config.errors import Problem

_SHOWN = 3  # names; a list of them all helps nobody


def is_finite(tensor: Tensor) -> bool:
    """Whether each of its numbers is."""
    return bool(torch.isfinite(tensor.float() if tensor.is_floating_point() else tensor).all())  # FP8 cannot say


def check_weights(path: Path) -> None:
    """Look at each weight of the checkpoint `path`, one at a time. Raises CheckpointError where one is not finite."""
    refuse(path, look_at_weights(path, is_finite))


def finite_weights(path: Path) -> dict[str, Tensor]:
    """The weights of the checkpoint `path`, likewise."""
    weights = read_weights(path)
    refuse(path, {name: is_finite(weight) for name, weight in weights.items()})
    return weights


def refuse(path: Path, finite: Mapping[str, bool]) -> None:
    """Raise CheckpointError unless each of these weights of `path` is finite."""
    if names := [name for name in sorted(finite) if not finite[name]]:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        cause = f"{path} holds weights that are not finite (NaN or infinite): {', '.join(names[:_SHOWN])}{more}"
        remedy = "name another checkpoint, such as an earlier one of the same run (RUN/checkpoints/step-NNNNNNNN)"
        raise CheckpointError([Problem(cause, remedy)])
