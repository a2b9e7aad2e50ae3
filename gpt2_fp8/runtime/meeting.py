"""The processes that a launcher has started meet, before any of them does anything that the others would not know of.

They meet in a store: a key-value server of torch's, which torchrun's agent has, or rank 0. The agent's outlives a
restart of the processes, and so do keys in it. A process group that torch 2.13 forms in it after a restart finds the
addresses of processes that are gone, and waits for them for half an hour. So each generation of processes has a prefix
of its own, which rank 0 makes up and tells each process that says hello.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.runtime import agent, roll_call
from gpt2_fp8.runtime.attendance import Attendance
from gpt2_fp8.runtime.launched import Launcher
from gpt2_fp8.runtime.launcher import turns_before
from gpt2_fp8.runtime.meeting_place import connected
from gpt2_fp8.runtime.patience import LOOK_SECONDS

HEARD_SECONDS = 2.0  # in which the others hear rank 0's last word
_GROUP = "gpt2_fp8"

_current: Meeting | None = None


class Meeting:
    """One generation of a run's processes, in a store.

    Attributes:
        launcher: which process this is.
        name: of this generation, unlike any other's.
        store: only of this generation.
        gathered: whether the processes have told each other all that they tell before a run.
        folder: the folder of the run, if an earlier generation has had one.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._everyones = everyones(connected(launcher))  # of all generations
        self._attendance = Attendance(launcher.rank)
        self.folder: str | None = None
        self.gathered = False
        if self._everyones.check(["folder"]):
            self.folder = self._everyones.get("folder").decode()
            # The count is each agent's own, and another node's failure counts nowhere.
            self.launcher = launcher._replace(restarts=max(launcher.restarts, 1))
        elif launcher.agent_listens:  # what the agent has started before was refused, and the folder may be another's
            self.launcher = launcher._replace(restarts=turns_before())
        try:
            self.name = roll_call.call(self.launcher, self._everyones, self._attendance)
        except BaseException as error:
            # In the agent's store the next generation would hear it, and the agent ends the others anyway.
            if not launcher.agent_listens and not isinstance(error, roll_call.Elsewhere):
                self._part(error)
            raise
        self._attendance.speaks = launcher.rank == 0
        self.store = dist.PrefixStore(self.name, self._everyones)

    def _part(self, error: BaseException) -> None:
        if not isinstance(error, RunError):  # a signal, for one
            self._attendance.leave(self._everyones, error)
            return
        seconds = HEARD_SECONDS if self._attendance.speaks else roll_call.GRACE_SECONDS + HEARD_SECONDS
        self._attendance.part(self._everyones, error, self.launcher.world_size - 1, seconds)

    def exchange(self, topic: str, own: Any) -> list[Any]:
        """Tell the others `own`, which becomes JSON, and return what every rank has told, in their order. Collective.

        Raises NotMet if a process does not come, or has ended.
        """
        self.store.set(f"{topic}/{self.launcher.rank}", json.dumps(own))
        keys = [f"{topic}/{rank}" for rank in range(self.launcher.world_size)]
        self._attendance.wait(
            self.store, lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        )
        return [json.loads(self.store.get(key)) for key in keys]

    def leave(self, error: BaseException) -> None:
        """Tell the others that this process ends, if they may still be waiting for it. Raises nothing."""
        if not self.gathered and not agent.is_gone():
            self._attendance.leave(self.store, error)

    def group_store(self) -> dist.Store:
        """Return where a process group may be formed."""
        return dist.PrefixStore("group", self.store)

    def keep_folder(self, folder: str) -> None:
        """Have the next generation find the run's folder. Rank 0 alone calls it."""
        self._everyones.set("folder", folder)

    def say(self, text: str) -> None:
        """Tell the other ranks that rank 0 has printed `text`, its last word; wait a moment until they know.

        Raises nothing: the agent, which may have the store, may be gone.
        """
        if agent.is_gone():  # asking a store that is gone, torch prints where it was asked
            return
        others = [f"heard/{rank}" for rank in range(1, self.launcher.world_size)]
        until = time.monotonic() + HEARD_SECONDS
        with suppress(RuntimeError):
            self.store.set("said", text)
            while time.monotonic() < until and not all(self.store.check([key]) for key in others):
                time.sleep(LOOK_SECONDS)

    def has_said(self, text: str, seconds: float) -> bool:
        """Return whether rank 0 has printed this last word too, or will within `seconds`."""
        until = time.monotonic() + seconds
        with suppress(RuntimeError):  # the store is gone, with rank 0 or with the agent
            while time.monotonic() < until and not agent.is_gone():
                if self.store.check(["said"]):
                    said = self.store.get("said").decode()
                    self.store.set(f"heard/{self.launcher.rank}", "")
                    return said == text
                time.sleep(LOOK_SECONDS)
        return False


def everyones(store: dist.Store) -> dist.Store:
    """Return what all generations of a run have of a store."""
    return dist.PrefixStore(_GROUP, store)


def join(launcher: Launcher) -> Meeting:
    """Meet the other processes that `launcher` has started. Raises NotMet if they do not."""
    global _current
    _current = Meeting(launcher)
    return _current


def current() -> Meeting | None:
    """Return the meeting that this process has joined; None if there was none to join."""
    return _current
