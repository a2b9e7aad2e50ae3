"""Who says how a run has ended: its only process, or of several ranks rank 0, and a rank that failed for itself."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import ranks, signals

if TYPE_CHECKING:
    from gpt2_fp8.runtime.rendezvous import Meeting

AGENT_SECONDS = 5.0  # in which the agent of a refused rank 0 ends the others


def end(error: RunError | None, met: Meeting | None) -> int:
    """Say how the run has ended, `error`, or None for what nobody expected and is being handled; the exit code.

    The other ranks wait until rank 0 has come to its end: an agent ends all when the first of them is gone.
    `met`: where the ranks have met; None: they have not.
    """
    text = traceback.format_exc().rstrip("\n") if error is None else str(error)
    if met is not None:
        met.tell(error or RunError(text.splitlines()[-1]))
    if ranks.is_first_rank():
        say(text)
        if met is not None:
            met.say(text)
    elif met is not None:
        met.end_after_rank_zero(error, text)
    elif _has_agent():
        until = time.monotonic() + AGENT_SECONDS
        while signals.received() is None and time.monotonic() < until:
            time.sleep(0.1)
        if signals.received() is None:  # rank 0 was not refused
            say(f"rank {ranks.current().rank}: {text}")
    return 1 if error is None else error.exit_code


def say(text: str) -> None:
    """Print to standard error, without what a terminal would obey. Raises nothing if the terminal is gone."""
    with suppress(OSError):
        print(harmless(text), file=sys.stderr, flush=True)


def _has_agent() -> bool:
    with suppress(UserError):
        return ranks.current().has_agent
    return False
