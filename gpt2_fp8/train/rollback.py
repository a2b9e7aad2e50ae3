"""Where a run continues after a rollback: its newest checkpoint that is sound and older than the divergence."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.engine.divergence import RollBack

log = logging.getLogger(__name__)


def checkpoint_before(back: RollBack, folder: Path, saved: Collection[int], origin: Path | None) -> Path | None:
    """Return the checkpoint in `folder` to go back to, and log it; None: the run starts again.

    `saved`: the steps that this process has written there; other steps may be another run's. `origin`: the checkpoint
    that the run continued from. It counts as the run's own, and so do those before it in the same folder. If none is
    older than the divergence, the oldest one after its beginning will do, provided no update was made since.
    """
    found = pointers.steps(folder)
    before_origin = pointers.step_of(origin.name) if origin and origin.parent.resolve() == folder.resolve() else None
    own = {step: path for step, path in found.items() if step in saved or step <= (before_origin or 0)}
    candidates = [own[step] for step in sorted(own, reverse=True) if step <= back.before]
    candidates += [origin] if origin else []
    if back.weights_intact:
        candidates += [own[step] for step in sorted(own) if back.before < step <= back.step]
    path = next((path for path in candidates if is_sound(path)), None)
    where = f"to {path}" if path else "to the start, since no sound checkpoint is older than the trouble"
    log.warning("step %d: going back %s", back.step, where)
    return path


def is_finite(tensor: Tensor) -> bool:
    """Return whether each number of the tensor is finite."""
    return bool(torch.isfinite(tensor.float() if tensor.is_floating_point() else tensor).all())  # FP8 has no isfinite


def is_sound(path: Path) -> bool:
    """Return whether a checkpoint can be read, with finite weights and moments.

    A weight that is not finite shows in no loss before the next step, and may have been saved meanwhile.
    """
    try:
        checkpoint = files.read(path)
    except (files.CheckpointError, OSError):
        return False
    parts = checkpoint["state_dict"], checkpoint.get("optimizer_states", [])
    return all(is_finite(tensor) for tensor in _tensors(parts))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
