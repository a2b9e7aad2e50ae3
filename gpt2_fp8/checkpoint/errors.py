"""How an unreadable checkpoint is reported."""

from __future__ import annotations

from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError


class CheckpointError(UserError):
    """A folder that was named as a checkpoint cannot be read as one, or does not fit the run."""


def unreadable(path: Path, why: str) -> CheckpointError:
    """Return the error that says why the folder `path` is not a readable checkpoint."""
    remedy = "name the folder of a whole checkpoint: RUN/checkpoints/step-NNNNNNNN"
    return CheckpointError([Problem(f"{path} cannot be read as a checkpoint: {why}", remedy)])
