"""How the processes of one generation of a run come together in a store: each once, of one run, and none of another.

The store of torchrun's agent outlives a restart of the processes, and so do keys in it. Such a store has one run, and
its agent counts the ranks. Rank 0's store is new, but anybody may come there who has its address and port.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time
import uuid

import torch.distributed as dist

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.runtime.attendance import Attendance
from gpt2_fp8.runtime.launched import Launcher
from gpt2_fp8.runtime.meeting_place import place
from gpt2_fp8.runtime.patience import NotMet

GRACE_SECONDS = 20.0  # in which another process may come in the place of one that has left
STRANGER_SECONDS = 10.0  # in which a process with rank 0's own command line is preferred to one with another
_OWN_RANK = "RANK=0, 1, ..., each for one process"
_OWN_PORT = "another MASTER_PORT for another run"


class Elsewhere(NotMet):
    """Those who meet here are another run, which this process does not concern."""


def call(launcher: Launcher, store: dist.Store, attendance: Attendance) -> str:
    """Return the name of this generation, the same for all its processes. Collective.

    Raises NotMet if a process does not come, if it comes twice, or if those who meet here are another run.
    """
    own = _Hello(launcher, store, attendance)
    if not launcher.agent_listens:
        own.open()
    return own.answer() if launcher.rank else own.gather()


class _Hello:
    """What a process says of itself. It has a word of its own, since keys of processes that are gone may be there."""

    def __init__(self, launcher: Launcher, store: dist.Store, attendance: Attendance) -> None:
        self._launcher, self._store, self._attendance = launcher, store, attendance
        self._word = uuid.uuid4().hex
        self._began = time.monotonic()
        # Of two runs that begin at one port at the same moment, each rank 1 is to come to its own rank 0, or to none.
        # Agents' and Lightning's ports are a run's own, and Lightning gives the processes that it starts more words.
        words = [] if launcher.agent_listens or not launcher.starts_all else sys.argv[1:]
        self._command = hashlib.sha256(json.dumps(words).encode()).hexdigest()

    def open(self) -> None:
        """Have rank 0 say whose store this is, and the others see whether it is theirs."""
        own = [self._launcher.world_size, self._launcher.name, self._launcher.step]
        if not self._launcher.rank:
            opened = self._store.compare_set("opened", "", json.dumps([*own, self._word])).decode()
            if json.loads(opened)[-1] != self._word:
                cause = f"another process is rank 0 at {place(self._launcher)}: of this run, or of another"
                raise NotMet.refused(cause, f"one process with RANK=0; {_OWN_PORT}")
            self._attendance.speaks = True
            return
        self._attendance.wait(self._store, lambda: [] if self._store.check(["opened"]) else [0])
        theirs = json.loads(self._store.get("opened"))[:-1]
        if theirs != own:
            error = Elsewhere if theirs[-1] != own[-1] else NotMet
            cause = f"{_shown(theirs)} meet at {place(self._launcher)}, and this is one of {_shown(own)}"
            raise error.refused(cause, f"one WORLD_SIZE for all processes of a run; {_OWN_PORT}")

    def gather(self) -> str:
        """Answer everyone's hello with this rank 0's word, until all have said that they have the answer."""
        try:
            self._attendance.wait(self._store, self._missing, GRACE_SECONDS)
        except RunError as error:
            generation = dist.PrefixStore(self._word, self._store)  # where those are who have an answer
            self._attendance.speaks = True
            self._attendance.leave(generation, error)
            generation.set("said", "")
            raise
        self._store.set("complete", self._word)
        return self._word

    def answer(self) -> str:
        """Say hello, and take the name from the answer."""
        rank = self._launcher.rank
        hello = json.dumps([self._word, socket.gethostname()])
        self._store.set(f"hello/{rank}/{self._command}", hello)
        self._store.set(f"hello/{rank}", hello)
        self._attendance.wait(self._store, self._unanswered, GRACE_SECONDS)
        name = self._store.get(f"answer/{self._word}").decode()
        if self._store.compare_set(f"{name}/here/{rank}", "", self._word).decode() != self._word:
            raise self._twice()
        return name

    def _twice(self) -> NotMet:
        return NotMet.refused(f"two processes say that they are rank {self._launcher.rank}", _OWN_RANK)

    def _missing(self) -> list[int]:
        others = range(1, self._launcher.world_size)
        for other in others:
            keys = [f"hello/{other}/{self._command}"]
            if time.monotonic() - self._began > STRANGER_SECONDS:
                keys.append(f"hello/{other}")
            for key in keys:
                if self._store.check([key]):
                    word, self._attendance.hosts[other] = json.loads(self._store.get(key))
                    self._store.set(f"answer/{word}", self._word)
        return [other for other in others if not self._store.check([f"{self._word}/here/{other}"])]

    def _unanswered(self) -> list[int]:
        complete = not self._launcher.agent_listens and self._store.check(["complete"])
        if self._store.check([f"answer/{self._word}"]):
            return []
        rank = self._launcher.rank
        if complete:
            cause = f"the processes that meet at {place(self._launcher)} are complete, with another rank {rank}"
            raise NotMet.refused(cause, f"{_OWN_RANK}; {_OWN_PORT}")
        if json.loads(self._store.get(f"hello/{rank}/{self._command}"))[0] != self._word:
            raise self._twice()
        return [0]


def _shown(run: list[object]) -> str:
    world_size, name, step = run
    return f"{world_size} processes by {name}" + (f" in step {step} of SLURM" if step else "")
