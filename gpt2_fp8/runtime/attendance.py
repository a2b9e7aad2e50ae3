"""Waits for ranks in a store, and hears of one that has ended instead of coming."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from gpt2_fp8.config.errors import Problem, SharedRefusal, UserError
from gpt2_fp8.runtime import patience
from gpt2_fp8.runtime.patience import NotMet

_SHOWN = 8  # ranks that are named


class Attendance:
    """Who is there of a run's processes, as this rank knows.

    Attributes:
        hosts: those of ranks that have said where they are.
    """

    def __init__(self, rank: int) -> None:
        self.hosts: dict[int, str] = {}
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
                if heard[-1] - heard[0] >= grace:
                    raise _left(store.get("left").decode())
            return self._shown(ranks)

        try:
            patience.wait(lacking, says=not self._rank)
        except dist.DistError as error:
            raise NotMet(f"rank {self._rank} has lost the connection to rank 0") from error

    def leave(self, store: dist.Store, error: BaseException) -> None:
        """Tell the others, who may be waiting for this process, that it ends. Raises nothing."""
        problems = error.problems if isinstance(error, NotMet | UserError) else []
        lines = str(error).splitlines()
        why = problems or (lines[0] if lines else type(error).__name__)
        with suppress(RuntimeError):
            store.set("left", json.dumps([f"rank {self._rank} on {socket.gethostname()}", why]))

    def _shown(self, ranks: list[int]) -> str:
        names = [f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}" for rank in ranks]
        return ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _left(word: str) -> NotMet | SharedRefusal:
    who, why = json.loads(word)
    if isinstance(why, str):
        return NotMet(f"{who} has ended: {why}")
    return SharedRefusal([Problem(f"{who}: {cause}", remedy) for cause, remedy in why])
