"""Waits for ranks in a store, and hears of one that has ended instead of coming."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from gpt2_fp8.config.errors import Problem, RunError, SharedRefusal, UserError
from gpt2_fp8.runtime import patience
from gpt2_fp8.runtime.patience import NotMet

_SHOWN = 8  # ranks that are named


class Attendance:
    """Who is there of a run's processes, as this rank knows.

    Args:
        rank: this process's; None: its variables do not say.

    Attributes:
        hosts: those of ranks that have said where they are.
        speaks: whether this process is rank 0, and says what all are refused for.
    """

    def __init__(self, rank: int | None) -> None:
        self.hosts: dict[int, str] = {}
        self.speaks = False
        self._rank = rank

    def wait(self, store: dist.Store, missing: Callable[[], list[int]], grace: float = 0.0) -> None:
        """Wait until no rank is `missing`; rank 0 says now and then which is.

        A rank may leave word in `store` that it ends. For `grace` seconds, another process may come in its place.
        Raises NotMet if a rank does not come, and for such a word NotMet or SharedRefusal.
        """
        heard: list[float] = []

        def lacking() -> str:
            ranks = missing()
            if ranks and store.check(["left"]):
                heard.append(time.monotonic())
                kept, *word = json.loads(store.get("left"))
                if kept or heard[-1] - heard[0] >= grace:  # nobody comes in the place of who has the store
                    raise _left(kept, *word)
            return self._shown(ranks)

        try:
            patience.wait(lacking, says=not self._rank)
        except dist.DistError as error:
            lost = NotMet(f"rank {self._rank} has lost the connection to rank 0")
            lost.teller = 1
            raise lost from error

    def leave(self, store: dist.Store, error: BaseException) -> None:
        """Tell the others, who may be waiting for this process, that it ends. Raises nothing."""
        problems = error.problems if isinstance(error, NotMet | UserError) else []
        lines = str(error).splitlines()
        why = problems or (lines[0] if lines else type(error).__name__)
        with suppress(RuntimeError):
            who = "a process" if self._rank is None else f"rank {self._rank}"
            store.set("left", json.dumps([self.speaks, f"{who} on {socket.gethostname()}", why]))

    def part(self, store: dist.Store, error: RunError, others: int, seconds: float) -> None:
        """Leave word of `error`, and wait until it is told once: rank 0 for the `others` to hear, they for rank 0.

        Sets `error.told` if rank 0 says it. After `seconds`, this process has to. Raises nothing.
        """
        if self.speaks or not error.told:
            self.leave(store, error)

        def lacking() -> str:
            if self.speaks:
                return "the others" if store.add("heard", 0) < others else ""
            error.told = store.check(["told"])
            return "" if error.told or store.check(["complete"]) else "rank 0"

        with suppress(RuntimeError, NotMet):
            if self.speaks:
                store.set("told", "")
            patience.wait(lacking, seconds, says=False)
            if error.told:
                store.add("heard", 1)

    def _shown(self, ranks: list[int]) -> str:
        names = [f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}" for rank in ranks]
        return ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _left(kept: bool, who: str, why: str | list[list[str]]) -> NotMet | SharedRefusal:
    if not isinstance(why, str):
        return SharedRefusal([Problem(f"{who}: {cause}", remedy) for cause, remedy in why])
    ended = NotMet(f"{who} has ended: {why}")
    ended.told = kept  # who has the store is rank 0
    return ended
