"""The processes that a launcher has started meet, before any of them does anything that the others would not know of.

They meet in a store: a key-value server of torch's, which torchrun's agent has, or rank 0. The agent's outlives a
restart of the processes, and so do keys in it. A process group that torch 2.13 forms in it after a restart finds the
addresses of processes that are gone, and waits for them for half an hour. So each generation of processes has a prefix
of its own, which rank 0 makes up and tells each process that says hello.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.runtime import agent, signals
from gpt2_fp8.runtime.launched import Launcher

# Processes are started together, but one may still import its packages from a slow disk while the others wait.
PATIENCE_SECONDS = 300.0
HEARD_SECONDS = 2.0  # in which the others hear rank 0's last word
_LOOK_SECONDS = 0.1
_GROUP = "gpt2_fp8"

_current: Meeting | None = None


class NotMet(RunError):
    """The processes of a run do not find each other."""


class Meeting:
    """One generation of a run's processes, in a store.

    Attributes:
        launcher: which process this is.
        name: of this generation, unlike any other's.
        store: only of this generation.
        folder: the folder of the run, if an earlier generation has had one.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._everyones = dist.PrefixStore(_GROUP, _connected(launcher))  # of all generations
        self.folder: str | None = None
        if self._everyones.check(["folder"]):
            self.folder = self._everyones.get("folder").decode()
            # The count is each agent's own, and another node's failure counts nowhere.
            self.launcher = launcher._replace(restarts=max(launcher.restarts, 1))
        self.name = self._generation()
        self.store = dist.PrefixStore(self.name, self._everyones)

    def exchange(self, topic: str, own: Any) -> list[Any]:
        """Tell the others `own`, which becomes JSON, and return what every rank has told, in their order. Collective.

        Raises NotMet if a process does not come within `PATIENCE_SECONDS`.
        """
        self.store.set(f"{topic}/{self.launcher.rank}", json.dumps(own))
        keys = [f"{topic}/{rank}" for rank in range(self.launcher.world_size)]
        _wait_for(lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])], self.launcher.rank)
        return [json.loads(self.store.get(key)) for key in keys]

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
                time.sleep(_LOOK_SECONDS)

    def has_said(self, text: str, seconds: float) -> bool:
        """Return whether rank 0 has printed this last word too, or will within `seconds`."""
        until = time.monotonic() + seconds
        with suppress(RuntimeError):  # the store is gone, with rank 0 or with the agent
            while time.monotonic() < until and not agent.is_gone():
                if self.store.check(["said"]):
                    said = self.store.get("said").decode()
                    self.store.set(f"heard/{self.launcher.rank}", "")
                    return said == text
                time.sleep(_LOOK_SECONDS)
        return False

    def _generation(self) -> str:
        """Return the name of this generation: rank 0 makes it up, and answers everyone's hello with it.

        Keys of processes that are gone may still be there. So each process says hello by a word of its own, and rank 0
        answers until all have said that they have the answer.
        """
        rank, others, store = self.launcher.rank, range(1, self.launcher.world_size), self._everyones
        ours = uuid.uuid4().hex
        if rank:
            store.set(f"hello/{rank}", ours)
            _wait_for(lambda: [] if store.check([f"answer/{ours}"]) else [0], rank)
            name = store.get(f"answer/{ours}").decode()
            store.set(f"{name}/here/{rank}", "")
            return name

        def missing() -> list[int]:
            for other in others:
                if store.check([f"hello/{other}"]):
                    store.set(f"answer/{store.get(f'hello/{other}').decode()}", ours)
            return [other for other in others if not store.check([f"{ours}/here/{other}"])]

        _wait_for(missing, rank)
        return ours


def join(launcher: Launcher) -> Meeting:
    """Meet the other processes that `launcher` has started. Raises NotMet if they do not come."""
    global _current
    _current = Meeting(launcher)
    return _current


def current() -> Meeting | None:
    """Return the meeting that this process has joined; None if there was none to join."""
    return _current


def _connected(launcher: Launcher) -> dist.TCPStore:
    assert launcher.address is not None
    assert launcher.port is not None
    listens = launcher.rank == 0 and not launcher.agent_listens
    try:
        return dist.TCPStore(
            launcher.address,
            launcher.port,
            launcher.world_size,
            is_master=listens,
            timeout=timedelta(seconds=PATIENCE_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:  # torch's errors of connections are RuntimeErrors
        what = "cannot listen" if listens else "finds nobody who listens"
        place = f"{launcher.address}:{launcher.port} (MASTER_ADDR, MASTER_PORT)"
        raise NotMet(f"rank {launcher.rank} {what} at {place}: {str(error).splitlines()[0]}") from error


def _wait_for(missing: Callable[[], list[int]], rank: int) -> None:
    """Wait until no rank is `missing`. A signal ends it. Raises NotMet after `PATIENCE_SECONDS`."""
    until = time.monotonic() + PATIENCE_SECONDS
    try:
        with signals.interruptible():
            while ranks := missing():
                if time.monotonic() > until:
                    raise NotMet(f"rank {rank} has waited {PATIENCE_SECONDS:.0f} s for rank {ranks[0]}")
                time.sleep(_LOOK_SECONDS)
    except dist.DistError as error:
        raise NotMet(f"rank {rank} has lost the connection to rank 0") from error
