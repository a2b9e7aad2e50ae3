"""How a checkpoint that cannot be read is told: in one line, whatever the names and values inside it are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import line

_LONGEST = 1000  # characters of a cause; what a stranger's file holds may be of any length


class CheckpointError(UserError):
    """A folder that was named as a checkpoint cannot be read as one.

    Causes and remedies may quote the folder: what a terminal would obey in them is escaped, what is long is cut.
    """

    def __init__(self, problems: Iterable[Problem]):
        super().__init__([Problem(escaped(cause), escaped(remedy)) for cause, remedy in problems])


def unreadable(path: Path, why: str) -> CheckpointError:
    """The error that says why the folder `path` is no readable checkpoint."""
    remedy = "give the folder of a whole checkpoint (RUN/checkpoints/step-NNNNNNNN), or ckpt_path=last"
    return CheckpointError([Problem(f"{path} cannot be read as a checkpoint: {why}", remedy)])


def unfit(path: Path, why: str) -> CheckpointError:
    """The error that says why no run can continue from the folder `path`, whole as it is."""
    remedy = "name another checkpoint (RUN/checkpoints/step-NNNNNNNN); or init_from=PATH, which takes weights alone"
    return CheckpointError([Problem(f"{path} cannot be continued from: {why}", remedy)])


def escaped(text: str) -> str:
    r"""`text` in one line of some 1000 characters, with `\x1b` and the like for what does not print."""
    return line(text, _LONGEST)
