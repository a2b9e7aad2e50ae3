"""Which rank is lost, as each rank judges in a thread of its own: it counts silence, and sees who is stuck.

A rank that waits in a collective for a lost one waits until the process group's timeout, half an hour. NCCL's wait
cannot be interrupted. So every rank has a thread that gives signs of life (`runtime.heartbeats`), and one that judges
those of the others. The places of the main threads show one that hangs (`runtime.stragglers`).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.runtime import activity, collectives
from gpt2_fp8.runtime.heartbeats import BEAT_SECONDS, Heartbeats
from gpt2_fp8.runtime.rank_end import RankEnd, RankLost
from gpt2_fp8.runtime.stragglers import Place, Stragglers

LIFE_SECONDS = 60.0  # without a beat, after which a rank counts as lost
STUCK_SECONDS = 540.0  # that the others may wait for a rank that does not move: it may be compiling
GRACE_SECONDS = 5.0  # for this rank to end by itself, as all ranks do that see the same error


class RankWatch:
    """Watches the ranks that have met in a store, and ends this process if one is lost.

    Args:
        store: a `torch.distributed.Store`.
        rank, world_size: of this process, and how many there are.
        end: ends this process.
        agent: which has the store, as a message names it; None: rank 0 has.

    Attributes:
        ending: whether this rank is ending by itself, and may need time to save.
    """

    def __init__(self, store: Any, rank: int, world_size: int, end: RankEnd, agent: str | None) -> None:
        self.ending = False
        self._rank, self._end, self._agent = rank, end, agent
        self._ranks = Heartbeats(store, rank, world_size, _place)
        threading.Thread(target=self._watch, name="ranks watch", daemon=True).start()

    def explain(self, error: BaseException) -> RankLost | None:
        """Return the lost rank if `error` is a torn connection to it; else tell the others of `error`.

        Call it at the end of the process: `close` follows.
        """
        self.ending = True
        lost = self._lost_with_connection() if _is_connection(error) else None
        while self._end.leaving.is_set():  # until the thread is done: the same end is not to be told twice
            time.sleep(BEAT_SECONDS)
        if lost is None:
            code = error.exit_code if isinstance(error, RunError) else 1
            words = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            self._ranks.tell(words.splitlines()[0], code)
        return lost

    def close(self) -> None:
        """Stop watching: this rank has come to its end."""
        self._ranks.end()
        # Rank 0 waits for ranks that are about to leave too. Their connections end with its process.
        until = time.monotonic() + GRACE_SECONDS
        while not self._rank and time.monotonic() < until and self._lost() is None and not self._ranks.all_ended():
            time.sleep(0.05)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Check once a second whether all ranks are alive.

        Seconds are counted in this thread, so the time for which a whole job was stopped does not count.
        """
        ranks = self._ranks
        before, silence, waited = [0] * ranks.world_size, [0.0] * ranks.world_size, 0.0
        stragglers = Stragglers(ranks.world_size, STUCK_SECONDS)
        while not ranks.over.wait(BEAT_SECONDS):
            counts = ranks.counts or before
            for rank, (new, old) in enumerate(zip(counts, before, strict=True)):
                silent = new == old and new >= 0  # below: ended
                silence[rank] = silence[rank] + BEAT_SECONDS if silent else 0.0
            before = counts
            lost = self._lost()
            waited = 0.0 if lost is None else waited + BEAT_SECONDS
            saves = self.ending or (lost is not None and lost.rank is None)  # without an agent, ranks can still save
            if lost is not None and waited > (LIFE_SECONDS if saves else GRACE_SECONDS):
                self._leave(lost)
            if ranks.places and (stuck := stragglers.look(ranks.places, BEAT_SECONDS)) is not None:
                where = f"stuck {ranks.places[stuck].where} for {STUCK_SECONDS:.0f} s"
                self._leave(RankLost(stuck, f"has been {where}, and the others wait for it"))
            if lost is None and (longest := max(silence)) > LIFE_SECONDS:
                how = f"has shown no life for {LIFE_SECONDS:.0f} s"
                if silence[self._rank] == longest:  # all ranks seem silent: the store does not answer
                    self._leave(self._lost_with_store(how, silent=True))
                self._leave(RankLost(silence.index(longest), how, silent=True))

    def _leave(self, lost: RankLost) -> None:
        self._end.leave(lost, self._ranks)

    def _lost(self) -> RankLost | None:
        """Return a rank that is known to have failed, or to be failing; None: none is."""
        if killed := self._end.failed_child(killed=True):
            return killed
        if told := self._ranks.failure:
            return RankLost(told.rank, f"failed: {told.message}", told.exit_code)
        if ended := self._end.failed_child(killed=False):
            return ended
        return self._lost_with_store("is gone") if self._ranks.lost else None

    def _lost_with_store(self, how: str, silent: bool = False) -> RankLost:
        return RankLost(None, f"{self._agent} {how}") if self._agent else RankLost(0, how, silent=silent)

    def _lost_with_connection(self) -> RankLost | None:
        """Return the rank whose end has broken a connection. It is known in a moment, or not at all."""
        ranks = self._ranks
        ranks.over.wait(2 * BEAT_SECONDS)  # the last count of a rank may still be under way
        before, until = ranks.counts, time.monotonic() + GRACE_SECONDS
        while (lost := self._lost()) is None and time.monotonic() < until:
            time.sleep(0.1)
        quiet = [rank for rank, (new, old) in enumerate(zip(ranks.counts, before, strict=False)) if new == old > 0]
        if lost is None and quiet:
            lost = RankLost(quiet[0], "is gone")
        return lost


def _place() -> Place:
    """Return where this main thread is."""
    return Place(collectives.entered(), activity.moves(), activity.where())


def _is_connection(error: BaseException) -> bool:
    """Return whether an error is of the connection between ranks. gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
