"""The ranks that Lightning's launcher starts from this process, until all have met.

The main thread may be waiting for one that has ended already, in a call that no signal reaches.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable

from gpt2_fp8.config.errors import Stopped
from gpt2_fp8.runtime import process_end
from gpt2_fp8.runtime.rank_end import STOPPED, RankEnd, RankLost, how_ended

SIGNAL_SECONDS = 5.0  # for this rank to end by the signal that has ended another
_LOOK_SECONDS = 0.2


class RankStart:
    """Ends this process if one that it has started ends before the ranks have met.

    Args:
        end: ends this process, and has the list of those that were started.
        take_over: called in the thread; puts into that list what was started meanwhile.

    `met` is to be set when the ranks have met, or never will.
    """

    def __init__(self, end: RankEnd, take_over: Callable[[], None]) -> None:
        self.met = threading.Event()
        self._end, self._take_over = end, take_over

    def watch(self) -> None:
        """Watch in a thread."""
        threading.Thread(target=self._watch, name="ranks start", daemon=True).start()

    def _watch(self) -> None:
        ended = None
        while ended is None and not self.met.wait(_LOOK_SECONDS):
            self._take_over()
            ended = next(((i, child) for i, child in enumerate(self._end.children, 1) if child.poll()), None)
        if ended is not None:
            self._follow(*ended)

    def _follow(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.returncode
        signum = STOPPED.get(code, -code if -code in process_end.SIGNALS else None)  # below 0: it had no handlers yet
        if signum is not None:
            os.kill(os.getpid(), signum)  # as if this process had received it
            if self.met.wait(SIGNAL_SECONDS):
                return
            self._end.leave(Stopped(signal.SIGTERM if signum in process_end.LIKE_SIGTERM else signum), None)
        self._end.leave(RankLost(rank, how_ended(child), max(code, 1)), None)
