"""Who says how a run has ended, of processes that end together; and the last of those whose rank 0 is gone."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

from gpt2_fp8.config.errors import RunError, Stopped, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import launcher

RANK_ZERO_SECONDS = 15.0  # seconds that another rank's process waits for rank 0 to end
AFTER_SIGNAL_SECONDS = 2.0  # the same after a signal, which rank 0 may not have got
_AFTER_RANK_ZERO = 10.0  # and in which it is to end when rank 0 is gone


def rank_zero(argv: Sequence[str]) -> int | None:
    """Return the process of rank 0 if Lightning has started this one for another rank: its parent. Else None."""
    return os.getppid() if is_launched(argv) else None


def is_launched(argv: Sequence[str]) -> bool:
    """Return whether Lightning has started this process, for another rank than 0: it says so in both places."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return rank != "0" and f"hydra.job.name=train_ddp_process_{rank}" in argv


def follow(rank_zero: int) -> None:
    """Leave no process behind where rank 0 was killed before the ranks had met (then: `runtime/rank_watch.py`)."""
    threading.Thread(target=_end_after, args=(rank_zero,), daemon=True).start()


def end(error: RunError | None, rank_zero: int | None) -> int:
    """Say how the run has ended, `error`, or None for what nobody expected and is being handled; the exit code."""
    text = traceback.format_exc().rstrip("\n") if error is None else str(error)
    if _is_one_of_several():
        _end_among_ranks(error, text)
        return 1 if error is None else error.exit_code
    if error is None:
        say(text)
    elif error.teller is not None:
        _tell(error, text)
        return error.exit_code
    stopped = isinstance(error, Stopped)
    ended = _rank_zero_ends(rank_zero, AFTER_SIGNAL_SECONDS if stopped else RANK_ZERO_SECONDS)
    told = ended or (stopped and rank_zero is not None)  # by rank 0, which ends as this one did, if only later
    if error is not None and not told:
        say(text)
    return 1 if error is None else error.exit_code


def _is_one_of_several() -> bool:
    """Return whether a launcher has started this process among others; also if it has said so wrongly."""
    try:
        return launcher.of_run().several
    except UserError:
        return True


def _is_first() -> bool:
    """Return whether this process is rank 0, or the first by every variable where these contradict each other."""
    try:
        found = launcher.of_run()
    except UserError:
        return launcher.is_first_of_all()
    return found.rank == 0


def _end_among_ranks(error: RunError | None, text: str) -> None:
    """Say how the run has ended, in one of the processes that a launcher has started. Rank 0 says what all would.

    The others wait for that: when the first of them ends, the launcher sends the rest a signal.
    """
    if isinstance(error, UserError) and _has_wrong_variables():
        _end_refused_start(error, text)
        return
    met = None
    if "gpt2_fp8.runtime.meeting" in sys.modules:
        from gpt2_fp8.runtime import meeting

        met = meeting.current()
        if met is not None:
            met.leave(error if error is not None else RunError(text.splitlines()[-1]))
    if error is not None and error.teller is not None:
        _tell(error, text)
        if met is not None and _is_first():
            met.say(text)
        return
    if _is_first():
        say(text)
        if met is not None:
            met.say(text)
        return
    if met is not None:
        told = met.has_said(text, RANK_ZERO_SECONDS) or (error is not None and error.told)
    else:
        told = isinstance(error, UserError) or (error is not None and error.told)  # of a command line that rank 0 has
        time.sleep(AFTER_SIGNAL_SECONDS)
    if not told:
        say(f"rank {os.environ.get('RANK', os.environ.get('SLURM_PROCID'))}: {text}")


def _has_wrong_variables() -> bool:
    try:
        launcher.of_run()
    except UserError:
        return True
    return False


def _end_refused_start(error: UserError, text: str) -> None:
    """Say what is wrong with this process's variables, once for all processes that have the same, or wait for it."""
    from gpt2_fp8.runtime import refused_start

    first = _is_first()
    if first:
        say(text)
    if not refused_start.tell(error) and not first:
        say(f"rank {os.environ.get('RANK') or '?'}: {text}")


def _tell(error: RunError, text: str) -> None:
    """Say an error that every rank may have, if it is this rank that says it."""
    rank = launcher.current().rank
    if rank == error.teller and error.exit_code != UserError.exit_code:  # a rank that refuses its input says so itself
        say(f"rank {rank}: {text}" if rank else text)


def say(text: str) -> None:
    """Print to standard error, without what a terminal would obey. Raises nothing if the terminal is gone."""
    with suppress(OSError):  # a terminal that is gone
        print(harmless(text), file=sys.stderr, flush=True)


def _end_after(rank_zero: int) -> None:
    while os.getppid() == rank_zero:
        time.sleep(0.5)
    time.sleep(_AFTER_RANK_ZERO)
    os._exit(1)


def _rank_zero_ends(rank_zero: int | None, patience: float) -> bool:
    """In a process that Lightning started for another rank, wait for rank 0 to end; whether it did.

    Where all ranks end alike, rank 0 is to write the summary, to say why, and to return the exit code.
    """
    until = time.monotonic() + patience
    while os.getppid() == rank_zero and time.monotonic() < until:
        time.sleep(0.1)
    return rank_zero is not None and os.getppid() != rank_zero
