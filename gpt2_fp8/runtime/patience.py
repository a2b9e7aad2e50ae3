"""Waits for other processes of the run: a signal ends them, a person sees who is waited for, and they have an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from gpt2_fp8.config.errors import Problem, RunError, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import signals

# Processes are started together, but one may still import its packages from a slow disk while the others wait.
PATIENCE_SECONDS = 300.0
NOTICE_SECONDS = 20.0  # between two lines that say who is waited for
LOOK_SECONDS = 0.1


class NotMet(RunError):
    """The processes of a run do not find each other. `problems`: what somebody has to mend, if that is known."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.problems: list[Problem] = []

    @classmethod
    def refused(cls, cause: str, remedy: str) -> NotMet:
        """Return one that somebody has to mend, with what UserError says, and its exit code.

        It is none: what a rank alone is refused for, it says itself.
        """
        error = cls(str(Problem(cause, remedy)))
        error.problems = [Problem(cause, remedy)]
        error.exit_code, error.status = UserError.exit_code, UserError.status
        return error


def wait(lacking: Callable[[], str], seconds: float = 0.0, says: bool = True) -> None:
    """Wait until nothing is `lacking`, which may raise, for `PATIENCE_SECONDS` or fewer `seconds`.

    `says`: whether this process prints what lacks, now and then. Raises NotMet when the time is over.
    """
    seconds = seconds or PATIENCE_SECONDS
    began = said = time.monotonic()
    with signals.interruptible():
        while what := lacking():
            now = time.monotonic()
            if now - began > seconds:
                raise NotMet(f"waited {now - began:.0f} s in vain for {what}")
            if says and now - said > NOTICE_SECONDS:
                said = now
                with suppress(OSError):  # a terminal that is gone
                    print(harmless(f"[{time.strftime('%H:%M:%S')}] waiting for {what}"), flush=True)
            time.sleep(LOOK_SECONDS)
