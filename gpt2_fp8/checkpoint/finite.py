"""Whether a checkpoint's weights are finite. A run skips every update that would make them anything else.

So what is not finite was put into the checkpoint, by a fault of the hardware or by a person. It would spoil every later
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.checkpoint.load import look_at_weights, read_weights
from gpt2_fp8.config.errors import Problem

_SHOWN = 3  # names; a list of all of them helps nobody


def is_finite(tensor: Tensor) -> bool:
    """Return whether each number of the tensor is finite."""
    return bool(torch.isfinite(tensor.float() if tensor.is_floating_point() else tensor).all())  # FP8 has no isfinite


def check_weights(path: Path) -> None:
    """Check each weight of the checkpoint `path`, one at a time. Raises CheckpointError if one is not finite."""
    refuse(path, look_at_weights(path, is_finite))


def finite_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of the checkpoint `path`. Raises CheckpointError if one is not finite."""
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
