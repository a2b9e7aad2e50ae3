"""The errors that end a run in a known way, and the exit code of each. Standard library only.

An error of ours (a broken invariant) is an `assert`; everything here is meant for the person at the keyboard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpt2_fp8.config.shown import line

_MOST = 100  # problems that are shown


class Problem(NamedTuple):
    """One thing wrong with what the user asked for, as two lines: what, and what to do about it."""

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"error: {self.cause}\n  fix: {self.remedy}"


class Finding(NamedTuple):
    """A problem and the keys it speaks of, so that what follows from another mistake can be left unsaid."""

    keys: tuple[str, ...]
    problem: Problem


class RunError(Exception):
    """An expected end of a run. `exit_code` is what the process returns, `status` what `summary.json` says."""

    exit_code = 1
    status = "failed"


class UserError(RunError):
    """The user's input is at fault; carries every problem found, so that they are all shown at once.

    Causes and remedies may quote a file or a value of anyone's: what a terminal would obey is escaped, and what is
    long is cut.
    """

    exit_code = 2
    status = "refused"

    def __init__(self, problems: Iterable[Problem]):
        self.problems = [Problem(line(cause), line(remedy)) for cause, remedy in problems]
        assert self.problems, "a UserError names at least one problem"
        shown = self.problems[:_MOST]
        if left := len(self.problems) - len(shown):
            shown.append(Problem(f"and {left:,} more", "correct these first"))
        super().__init__("\n".join(map(str, shown)))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[Problem]]]:
        """Pickle by the problems: an exception is otherwise made again from its text."""
        return type(self), (self.problems,)

    @classmethod
    def of(cls, cause: str, remedy: str) -> UserError:
        """A UserError of a single problem."""
        return cls([Problem(cause, remedy)])


class Diverged(RunError):
    """Training produced non-finite numbers past what the policy allows."""

    exit_code = 3
    status = "diverged"


class DataSourceLost(RunError):
    """A data source stopped answering for longer than its retries last."""

    exit_code = 4
    status = "data_lost"


class Stopped(RunError):
    """A signal asked the run to stop, and it did so after saving. `exit_code` is 128 + the signal's number."""

    status = "stopped"

    def __init__(self, signum: int):
        self.exit_code = 128 + signum
        super().__init__(f"stopped by signal {signum}; under the same run_name, ckpt_path=last continues")
