"""The end of a rank's process that waits for a lost one: it says why, ends its own processes, and leaves at once.

Its main thread hangs in a collective, and cannot be interrupted there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from gpt2_fp8.config.errors import Diverged, RunError, Stopped, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import peer
from gpt2_fp8.runtime.heartbeats import Heartbeats

ON_LOST_SECONDS = 10.0  # for `on_lost`
STOPPED = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM)}  # {exit code: the signal behind it}


class RankLost(RunError):
    """Another rank has ended, or shows no life. `exit_code` is that rank's if it is known, else 1.

    Attributes:
        rank: which; None: a launcher's process, not a rank.
        silent: whether its process may still be there.
    """

    def __init__(self, rank: int | None, how: str, exit_code: int = 1, silent: bool = False):
        self.rank, self.silent, self.exit_code = rank, silent, exit_code
        self.teller = 1 if rank == 0 else 0  # the first that is not lost
        self.cause = how if rank is None else f"rank {rank} {how}"
        if exit_code in STOPPED:
            self.status = Stopped.status
        # A run that was refused, or has diverged, does not go on by the same words.
        super().__init__(self.cause, lead=None if exit_code in (UserError.exit_code, Diverged.exit_code) else "; ")


class RankEnd:
    """Ends this process, a rank.

    Args:
        on_lost: called with the error before a thread ends the process. It tells how the run goes on, and writes the
            summary, within `ON_LOST_SECONDS`.

    Attributes:
        rank: of this process.
        children: the ranks that this one has started, in order: rank + 1 and so on.
        leaving: set while a thread is ending this process, and says why.
    """

    def __init__(self, on_lost: Callable[[RunError], Any]) -> None:
        self.on_lost = on_lost
        self.rank = 0
        self.children: list[subprocess.Popen[bytes]] = []
        self.leaving = threading.Event()

    def leave(self, error: RunError, ranks: Heartbeats | None) -> NoReturn:
        """End this process, whatever its main thread does. `ranks`: the signs of life by which the others learn it."""
        self.leaving.set()
        try:
            if ranks is not None and isinstance(error, RankLost):  # else they only learn that this one is gone
                ranks.tell(error.cause, error.exit_code)
            writer = threading.Thread(target=self.on_lost, args=(error,), daemon=True)
            writer.start()
            writer.join(ON_LOST_SECONDS)
            # A rank that refuses its input says so itself.
            if error.exit_code != UserError.exit_code and error.teller in (None, self.rank):
                print(harmless(f"rank {self.rank}: {error}"), file=sys.stderr, flush=True)
            _end_silent(error, ranks)
        finally:
            self.kill_children()
            os._exit(error.exit_code)

    def failed_child(self, killed: bool) -> RankLost | None:
        """Return a rank that this one has started and that a signal has ended (`killed`), or an error; None: none."""
        for i, child in enumerate(self.children):
            code = child.poll()
            if code and (code < 0) == killed:
                return RankLost(self.rank + 1 + i, how_ended(child))
        return None

    def kill_children(self) -> None:
        """Kill the ranks that this one has started: they may wait in a collective for it, which has failed.

        Lightning 2.6 does so only after a KeyboardInterrupt.
        """
        for child in self.children:
            child.kill()


def how_ended(child: subprocess.Popen[bytes]) -> str:
    """Return how a process has ended, for `RankLost`."""
    code = child.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"(process {child.pid}) {how}"


def _end_silent(error: RunError, ranks: Heartbeats | None) -> None:
    """Kill a rank without a sign of life, if it is on this host: its launcher would wait for it."""
    if isinstance(error, RankLost) and error.silent and error.rank is not None and ranks is not None:
        process = ranks.peers[error.rank] if ranks.peers else None
        if process is not None:
            peer.kill(process)
