"""Signs of life that the ranks of a run exchange: beats, places and the error of one that failed. Plain torch.

They go through the store by which the ranks have met. The thread also beats during a compilation, a download or a
save. It stops only if its process is gone, stopped or frozen.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from gpt2_fp8.runtime import peer
from gpt2_fp8.runtime.peer import Peer
from gpt2_fp8.runtime.stragglers import Place

BEAT_SECONDS = 1.0
_ENDED = -(1 << 40)  # marks a rank that ended: so negative that later beats cannot make it positive


class Failure(NamedTuple):
    """The error with which a rank ends."""

    rank: int
    message: str
    exit_code: int


class Heartbeats:
    """Beats for `rank` in a thread, and reads the other ranks' signs with every beat.

    Args:
        store: the `torch.distributed.Store` of the process group.
        rank, world_size: of this process, and how many there are.
        place: called in the thread; where this rank's main thread is.

    Attributes:
        counts: each rank's beats, as last read: 0 before its first, below 0 once it has ended; [] before the first
            read.
        places: each rank's, as last read; [] until every rank has told its own.
        peers: each rank's process, None for one that could not name itself; [] until every rank has told its own.
        failure: what another rank has told of its end; None: nothing.
        lost: whether the store no longer answers. Rank 0 holds it.
        over: set once the beats have stopped.
    """

    def __init__(self, store: Any, rank: int, world_size: int, place: Callable[[], Place]):
        self.rank, self.world_size, self._place = rank, world_size, place
        self.counts: list[int] = []
        self.places: list[Place] = []
        self.peers: list[Peer | None] = []
        self.failure: Failure | None = None
        self.lost = False
        self.over = threading.Event()
        self._own: Failure | None = None
        # A second connection: a wait may hold the main thread's for its whole duration.
        self._store = dist.PrefixStore("ranks", store.clone())
        self._store.set(f"peer-{rank}", json.dumps(peer.own()))
        self._store.set(str(rank), "1")
        threading.Thread(target=self._beat, name="ranks beat", daemon=True).start()

    def tell(self, message: str, exit_code: int) -> None:
        """Tell the other ranks why this one ends, and wait until all can have read it: the store ends with rank 0."""
        self._own = Failure(self.rank, message, exit_code)
        self.over.wait(2 * BEAT_SECONDS)

    def end(self) -> None:
        """Stop beating, and mark this rank as ended, so that its silence counts for nothing."""
        self.over.set()
        if not self.lost:
            with suppress(RuntimeError):
                self._store.add(str(self.rank), _ENDED)

    def all_ended(self) -> bool:
        """Ask the store whether every rank has ended; True if it no longer answers."""
        try:
            return self.lost or all(count < 0 for count in self._read())
        except RuntimeError:
            return True

    def _beat(self) -> None:
        try:
            while not self.over.wait(BEAT_SECONDS):
                self._store.add(str(self.rank), 1)
                if self._own is not None:
                    self._store.compare_set("failed", "", json.dumps(self._own))
                self.counts = self._read()
                self._share_place()
                if self.failure is None and self._store.check(["failed"]):
                    failed = Failure(*json.loads(self._store.get("failed")))
                    self.failure = None if failed.rank == self.rank else failed
        except (RuntimeError, ValueError, TypeError):  # the connection to rank 0, which holds the store
            self.lost = True

    def _read(self) -> list[int]:
        return [self._store.add(str(rank), 0) for rank in range(self.world_size)]

    def _share_place(self) -> None:
        """Write where this main thread is, and read where the others' are."""
        self._store.set(f"place-{self.rank}", json.dumps(self._place()))
        if places := self._everyones("place"):
            self.places = [Place(*place) for place in places]
        if not self.peers:  # early: the store may be a frozen process's
            self.peers = [told and Peer(*told) for told in self._everyones("peer")]

    def _everyones(self, topic: str) -> list[Any]:
        """Return what every rank has written of a topic; [] if one has not."""
        keys = [f"{topic}-{rank}" for rank in range(self.world_size)]
        return [json.loads(self._store.get(key)) for key in keys] if self._store.check(keys) else []
