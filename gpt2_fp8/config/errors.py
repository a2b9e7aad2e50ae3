"""The errors that end a run in a known way, and the exit code of each. Standard library only.

A broken invariant of this program is an `assert`. Everything here is meant for the person at the keyboard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpt2_fp8.config.shown import line


class Problem(NamedTuple):
    """What is wrong with what the user asked for, perhaps what to type instead, and the keys that it is about."""

    cause: str
    remedy: str = ""
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"error: {self.cause}" + (f"\n  fix: {self.remedy}" if self.remedy else "")


class RunError(Exception):
    """An expected end of a run. The process returns `exit_code`, and `summary.json` says `status`."""

    exit_code = 1
    status = "failed"
    lead: str | None = None  # what stands between the message and how the run goes on; None: nobody knows that
    told = False  # whether rank 0 says it, so that no other rank has to

    def __init__(self, message: str, lead: str | None = None):
        super().__init__(message)
        self.lead = lead

    def tell(self, how: str) -> None:
        """Add to the message how the run goes on, once."""
        if self.lead is not None:
            self.args, self.lead = (f"{self}{self.lead}{how}",), None


class UserError(RunError):
    """Bad input, with every problem that was found, each once. Texts from a stranger are shown as `shown.line` does."""

    exit_code = 2
    status = "refused"

    def __init__(self, problems: Iterable[Problem]):
        each = (problem._replace(cause=line(problem.cause), remedy=line(problem.remedy)) for problem in problems)
        self.problems = list(dict.fromkeys(each))
        assert self.problems, "a UserError names at least one problem"
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[Problem]]]:
        """Pickle by the problems: otherwise an exception is built again from its text."""
        return type(self), (self.problems,)

    @classmethod
    def of(cls, cause: str, remedy: str = "") -> UserError:
        """Return a UserError with a single problem."""
        return cls([Problem(cause, remedy)])


class SharedRefusal(UserError):
    """Bad input that every rank knows of and refuses, so that rank 0 alone says it."""

    told = True


class Diverged(RunError):
    """Training produced non-finite numbers past what the policy allows."""

    exit_code = 3
    status = "diverged"


class Drifted(RunError):
    """Ranks that should train the same weights do not. It is the same error on all of them."""

    told = True

    def __init__(self, message: str):
        super().__init__(message, lead="; ")


class DataSourceLost(RunError):
    """A data source stopped answering for longer than its retries last."""

    exit_code = 4
    status = "data_lost"


class Stopped(RunError):
    """A signal asked the run to stop, and what there was to save is saved. `exit_code`: 128 + the signal's number."""

    status = "stopped"
    told = True

    def __init__(self, signum: int):
        self.exit_code = 128 + signum
        super().__init__(f"stopped by signal {signum}", lead="; ")


class JobError(RunError):
    """How a job of a parallel sweep has ended, in a process of its own."""

    def __init__(self, status: str, exit_code: int, message: str):
        self.status, self.exit_code = status, exit_code
        super().__init__(message)

    def __reduce__(self) -> tuple[type[JobError], tuple[str, int, str]]:
        """Pickle all three: otherwise an exception is built again from its text."""
        return type(self), (self.status, self.exit_code, str(self))
