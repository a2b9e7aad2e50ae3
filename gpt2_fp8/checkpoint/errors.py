"""How an unreadable checkpoint is reported: in one line, for any names and values inside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import line

_LONGEST = 1000  # characters of a cause; a stranger's file may hold text of any length


class CheckpointError(UserError):
    """A folder that was named as a checkpoint cannot be read as one.

    Causes and remedies may quote the folder. Control characters in them are escaped, and long ones are cut.
    """

    def __init__(self, problems: Iterable[Problem]):
        super().__init__([Problem(escaped(cause), escaped(remedy)) for cause, remedy in problems])


def unreadable(path: Path, why: str) -> CheckpointError:
    """Return the error that says why the folder `path` is not a readable checkpoint."""
    remedy = "name the folder of a whole checkpoint: RUN/checkpoints/step-NNNNNNNN"
    return CheckpointError([Problem(f"{path} cannot be read as a checkpoint: {why}", remedy)])


def unfit(path: Path, why: str) -> CheckpointError:
    """Return the error that says why no run can continue from the folder `path`, although it is whole."""
    remedy = "name another checkpoint (RUN/checkpoints/step-NNNNNNNN); or init_from=PATH, which takes only the weights"
    return CheckpointError([Problem(f"{path} cannot be continued from: {why}", remedy)])


def escaped(text: str) -> str:
    r"""Return `text` in one line of some 1000 characters. Characters that do not print are escaped, as in `\x1b`."""
    return line(text, _LONGEST)
