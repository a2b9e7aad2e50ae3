"""The ranks of a run: torch's agent starts them on this node, as torchrun does, and they meet in a store.

There they agree on a folder, form a process group, and learn which of them failed.

An agent's store outlives a restart of the ranks: a process group that torch 2.13 forms there finds addresses of
processes that are gone, and waits for them. So each generation of ranks has a prefix of its own, which rank 0 makes up
and tells each rank that says hello.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gpt2_fp8.compat.torch_private import rank_agent
from gpt2_fp8.config.errors import DataSourceLost, Diverged, Drifted, RunError, Stopped, UserError
from gpt2_fp8.runtime import programs, ranks, signals, slurm
from gpt2_fp8.runtime.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

PATIENCE_SECONDS = 300.0  # one rank may import its packages from a slow disk while the others wait
END_SECONDS = 30.0  # that other ranks wait for rank 0's end, which its thread brings about sooner
GRACE_SECONDS = 5.0  # for the main thread to see for itself that another rank has failed
SAVE_SECONDS = 600  # that the ranks, and under an agent of this process all of them, have to save after a signal
_LOOK_SECONDS = 0.05
_WATCH_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_AGREED = (Diverged, Drifted, DataSourceLost)  # ends to which all ranks come together

_joined: Meeting | None = None


class RankLost(RunError):
    """Another rank has failed, or the connection to one is gone."""

    def __init__(self, message: str, exit_code: int = RunError.exit_code, status: str = RunError.status) -> None:
        self.exit_code, self.status = exit_code, status
        super().__init__(message, lead="; ")


class Meeting:
    """One generation of a run's ranks, in a store.

    Attributes:
        kept: the run's folder, if an earlier generation had one; None otherwise.
        again: whether this generation may not be the first. Without the agent's store nobody knows.
        apart: the error by which this rank ends without the others; None: it has none. Its GPU may wait for theirs.
    """

    def __init__(self, place: Ranks) -> None:
        self.ranks = place
        self._every = dist.PrefixStore("gpt2_fp8", _store(place))  # of all generations
        self._store = dist.PrefixStore(self._generation(), self._every)
        if not place.rank:
            self._store.set("kept", self._every.get("folder").decode() if self._every.check(["folder"]) else "")
        self.kept = self._get("kept") or None
        self.again = self.kept is not None or (place.has_agent and not _is_agents())
        self._ending = threading.Event()
        self.apart: RunError | None = None
        self._lost: RankLost | None = None  # what is known of another rank's failure, also after the store has ended

    def _generation(self) -> str:
        own, place = uuid.uuid4().hex, self.ranks
        if place.rank:
            self._every.set(f"hello/{place.rank}", own)
            _wait(lambda: self._every.check([f"name/{own}"]), lambda: "rank 0")
            name = self._every.get(f"name/{own}").decode()
            self._every.set(f"{name}/here/{place.rank}", "")
            return name
        missing = set(range(1, place.world_size))

        def all_here() -> bool:
            for rank in list(missing):
                if self._every.check([f"hello/{rank}"]):  # perhaps of a process that is gone: it is asked again
                    self._every.set(f"name/{self._every.get(f'hello/{rank}').decode()}", own)
                if self._every.check([f"{own}/here/{rank}"]):
                    missing.discard(rank)
            return not missing

        _wait(all_here, lambda: "rank " + ", ".join(map(str, sorted(missing))))
        return own

    def folder(self, own: str | None) -> str:
        """Return rank 0's folder of the run, which also the next generation finds."""
        if not self.ranks.rank:
            folder = self.kept or str(own)
            self._store.set("folder", folder)
            self._every.set("folder", folder)
            return folder
        return self._get("folder")

    def claim(self, gpu: str) -> None:
        """Note that this rank computes on the GPU of this UUID. Raises UserError if another does, as NCCL would."""
        rank, host = str(self.ranks.rank), os.environ.get("NCCL_HOSTID")  # by which NCCL tells hosts apart
        owner = self._store.compare_set(f"{host} {gpu}", "", rank).decode()
        if owner != rank:
            raise UserError.of(f"the ranks {owner} and {rank} are on one GPU, {gpu}", "one process for each GPU")

    def group_store(self) -> dist.Store:
        """Return where a process group may be formed."""
        return dist.PrefixStore("group", self._store)

    def _get(self, key: str) -> str:
        _wait(lambda: self._store.check([key]) or self._failure() is not None, lambda: "rank 0")
        if not self._store.check([key]):
            raise self._failure() or RankLost("another rank is gone")
        return self._store.get(key).decode()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def watch(self, on_lost: Callable[[RunError], Any]) -> None:
        """Have a thread end this process when a rank has failed, and the main thread does not come to its end.

        NCCL does not tell it of another rank, and after a failure of its own it may wait for a GPU, which waits for
        another rank's. `on_lost` is called with the error before that: it writes the summary.
        """
        store: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # a wait may hold the main thread's connection
        threading.Thread(target=self._watch, args=(store, on_lost), name="ranks", daemon=True).start()

    def ending(self) -> None:
        """Note that this rank is ending by itself, and may need time to save."""
        self._ending.set()

    def explain(self, error: BaseException) -> BaseException:
        """Return the error that counts, RankLost for a torn connection; otherwise tell the other ranks of `error`."""
        if _is_connection(error):
            error = self.apart = self._torn(error)
        elif not isinstance(error, (RankLost, *_AGREED)):
            self.tell(error)
        self.ending()
        return error

    def _torn(self, error: BaseException) -> RankLost:
        if self._lost is not None:
            return self._lost
        until, name = time.monotonic() + 2 * GRACE_SECONDS, "another rank"
        with suppress(RuntimeError):  # the store is gone too
            self._store.set(f"torn/{self.ranks.rank}", "")
            while (lost := self._failure()) is None and time.monotonic() < until and signals.get_received() is None:
                time.sleep(_LOOK_SECONDS)
            if lost is not None:
                return lost
            silent = [str(rank) for rank in range(self.ranks.world_size) if not self._store.check([f"torn/{rank}"])]
            if len(silent) == 1 and signals.get_received() is None:  # several: some may wait in NCCL
                name = f"rank {silent[0]}"
        is_hang = "timed out" in str(error).lower()
        return RankLost(f"{name} hangs: it did not come to a collective" if is_hang else f"{name} is gone")

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends, unless they have come to an end together. Raises nothing."""
        if self._ending.is_set():
            return
        known = error if isinstance(error, RunError) else RunError(f"{type(error).__name__}: {error}")
        self.apart, words = known, (str(known).splitlines() or [""])[0]
        with suppress(RuntimeError):
            self._store.set("failed", json.dumps([self.ranks.rank, words, known.exit_code, known.status]))

    def say(self, text: str) -> None:
        """Tell the other ranks that rank 0 ends, and has printed `text`. Raises nothing."""
        with suppress(RuntimeError):
            self._store.set("said", text)
            if not _is_agents():  # the store ends with this process, and another's thread is to see why
                time.sleep(1.5 * _WATCH_SECONDS)

    def end_after_rank_zero(self, error: RunError | None, text: str) -> None:
        """Wait until rank 0 has come to its end, and print `text` unless rank 0 has said as much. Raises nothing."""
        if isinstance(error, RankLost):
            return
        said, silent = "", False
        until = time.monotonic() + (SAVE_SECONDS if isinstance(error, (Stopped, *_AGREED)) else END_SECONDS)
        with suppress(RuntimeError):  # the store is gone, with rank 0 or with the agent
            while not (there := self._store.check(["said"])) and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
            said, silent = self._store.get("said").decode() if there else "", not there
        known = error is not None and not silent and (error.told or text.splitlines()[0] in said)
        if not known and said != text:
            programs.say(f"rank {self.ranks.rank}: {text}")

    def _failure(self, store: dist.Store | None = None) -> RankLost | None:
        store = store or self._store
        if not store.check(["failed"]):
            return None
        rank, words, code, status = json.loads(store.get("failed"))
        self._lost = None if rank == self.ranks.rank else RankLost(f"rank {rank} {status}: {words}", code, status)
        return self._lost

    def _watch(self, store: dist.Store, on_lost: Callable[[RunError], Any]) -> None:
        error: RunError | None = None
        with suppress(RuntimeError):  # the store is gone, of which the main thread hears too
            while (error := self._failure(store)) is None and not self._ending.wait(_WATCH_SECONDS):
                pass
        if self._ending.wait(GRACE_SECONDS if error else None):
            if (error := self.apart) is None:
                return
            time.sleep(2 * GRACE_SECONDS + (END_SECONDS if self.ranks.rank else 0.0))
        assert error is not None
        with suppress(RuntimeError):
            if not self.ranks.rank and not store.check(["said"]):
                writer = threading.Thread(target=on_lost, args=(error,), daemon=True)
                writer.start()
                writer.join(2 * GRACE_SECONDS)
                programs.say(str(error))
                store.set("said", str(error))
                time.sleep(4 * _LOOK_SECONDS)  # for the others to read it: the store may end with this process
        os._exit(error.exit_code)


def join(place: Ranks) -> Meeting:
    """Meet the other ranks, or return where they have met. Raises RunError if one does not come."""
    global _joined
    if _joined is None:
        if place.has_agent:  # whose end nobody would tell: it starts each rank in a session of its own
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        ranks.export()
        try:
            _joined = Meeting(place)
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
            raise RunError(f"rank {place.rank} does not meet the others at {where}: {error}".splitlines()[0]) from error
    return _joined


def get_meeting() -> Meeting | None:
    """Return the meeting that this process has joined; None: it has joined none."""
    return _joined


def ending() -> None:
    """Note that this rank is ending by itself, with all others."""
    if _joined is not None:
        _joined.ending()


def _store(place: Ranks) -> dist.Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT") or 29500), place.world_size,
        is_master=place.rank == 0 and not _is_agents(), timeout=timedelta(seconds=PATIENCE_SECONDS),
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip


def _is_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait(done: Callable[[], bool], missing: Callable[[], str]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    with signals.allow_interrupt():
        while not done():
            if time.monotonic() > until:
                raise RunError(f"waited {PATIENCE_SECONDS:.0f} s in vain for {missing()}")
            time.sleep(_LOOK_SECONDS)


def _is_connection(error: BaseException) -> bool:
    """Return whether an error is of the connection between ranks. gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def launch(count: int, restarts: int, words: Sequence[str]) -> int:
    """Run this program with `words` as `count` ranks by torch's agent; returns the code of the first that failed.

    After a fault all ranks are started again, `restarts` times at most: not what was refused or stopped, or diverged.
    Raises RankLost if a rank was killed.
    """
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    def is_fault(failures: Mapping[int, ProcessFailure], left: int) -> bool:
        lost = _lost(failures)
        if lost is not None and left:
            programs.say(f"{lost}; all are started again: {restarts - left + 1} of {restarts}")
        return lost is not None

    for name in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    asked = (*signals.SIGNALS, *slurm.REQUEUE_SIGNALS) if ranks.is_batch_job() else signals.SIGNALS
    handled = [each.name for each in asked if signal.getsignal(each) != signal.SIG_IGN]  # nohup
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    here = "127.0.0.1"
    handler = registry.get_rendezvous_handler(RendezvousParameters("c10d", f"{here}:0", ranks.OWN_ID, 1, 1, here))
    spec = WorkerSpec(
        role="rank", local_world_size=count, rdzv_handler=handler, max_restarts=restarts, monitor_interval=0.1,
        entrypoint=sys.executable, args=(*_own_program(), *words), local_addr=here,
    )  # fmt: skip
    try:
        failures = rank_agent(spec, is_fault, SAVE_SECONDS).run().failures
    except SignalException as error:
        return signals.exit_code(error.sigval)
    finally:
        handler.shutdown()
    if not failures:
        return 0
    failed = _first(failures)[1]
    if _signal(failed) is not None:
        raise RankLost(f"{_lost(failures)}, and the others were ended")
    return failed.exitcode if failed.exitcode >= 0 else signals.exit_code(-failed.exitcode)  # it has said why


def _first(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and how; of several in a second the one that was killed."""
    return min(failures.items(), key=lambda each: (each[1].timestamp, _signal(each[1]) is None))


def _signal(failed: ProcessFailure) -> signal.Signals | None:
    """Return the signal that has killed a rank; None: it has ended, or was stopped."""
    is_killed = failed.exitcode < 0 and -failed.exitcode not in signals.SIGNALS
    return signal.Signals(-failed.exitcode) if is_killed else None


def _lost(failures: Mapping[int, ProcessFailure]) -> str | None:
    """Return which rank has failed by a fault; None: they have come to a known end, or were stopped."""
    rank, failed = _first(failures)
    if (killed := _signal(failed)) is not None:
        return f"rank {rank} (process {failed.pid}) was killed by {killed.name}"
    return f"rank {rank} (process {failed.pid}) failed" if failed.exitcode == RunError.exit_code else None


def _own_program() -> list[str]:
    """Return how Python starts this program: by its module, or by a script that calls `run.main`."""
    is_script = getattr(sys.modules["__main__"], "__spec__", None) is None and sys.argv[0].endswith(".py")
    return [sys.argv[0]] if is_script else ["-m", "gpt2_fp8.run"]
