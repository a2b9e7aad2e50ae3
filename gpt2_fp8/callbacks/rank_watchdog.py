"""The processes of one run watch each other. If one is gone or shows no life, all of them end and name it.

A rank that waits in a collective for a lost one waits until the process group's timeout, half an hour. NCCL's wait
cannot be interrupted. So every rank has a thread that counts upwards in the store through which the ranks have met. It
also counts during a compilation, a download or a save, and stops only if the process is gone, stopped or frozen. The
positions of the main threads are shared in the same way, and show one that hangs in a step (`stragglers`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gpt2_fp8.compat import lightning_process, torch_private
from gpt2_fp8.config.errors import RunError, Stopped
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import collectives, signals
from gpt2_fp8.runtime.stragglers import Place, Stragglers

LIFE_SECONDS = 60.0  # without a beat, after which a rank counts as lost
STUCK_SECONDS = 600.0  # that the others may wait for a rank in the middle of a step: it may be compiling
GRACE_SECONDS = 5.0  # for this rank to end by itself, as all ranks do that see the same error
ON_LOST_SECONDS = 10.0  # for `on_lost`
STOPPED = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM)}  # {exit code: the signal behind it}
_BEAT_SECONDS, _START_BEAT_SECONDS = 1.0, 0.2
_ENDED = -(1 << 40)  # marks a rank that ended: so negative that later beats cannot make it positive


class RankLost(RunError):
    """Another rank has ended, or shows no life. `exit_code` is that rank's if it is known, else 1."""

    def __init__(self, message: str, exit_code: int = 1):
        self.exit_code = exit_code
        if exit_code in STOPPED:
            self.status = Stopped.status
        super().__init__(f"{message}; under the same run_name, ckpt_path=last continues")


class RankWatchdog(Callback):
    """Ends this process if another rank is lost. Does nothing if there is only one rank.

    Args:
        on_lost: called with the error before a thread ends the process, whose main thread hangs in a collective. It
            writes the summary, within `ON_LOST_SECONDS`.

    After `fit` has raised, the caller asks `explain` for the error that counts.
    """

    def __init__(self, on_lost: Callable[[RunError], Any] = lambda error: None) -> None:
        self.on_lost = on_lost
        self.children: list[subprocess.Popen[bytes]] = []  # the ranks that Lightning has started from this one
        self._rank, self._world = 0, 1
        self._store: Any = None
        self._over = threading.Event()
        self._met = threading.Event()  # the ranks have met, or never will
        self._ending = False
        self._to_post: str | None = None
        self._failure: RankLost | None = None  # the error that another rank has posted
        self._counts: list[int] = []  # each rank's beats, as last read
        self._step = 0  # the step that the main thread is in; 0: between two
        self._places: list[Place] = []  # each rank's, as last read
        self._store_lost = False

    def expect(self, launcher: object) -> None:
        """Watch the processes that a Trainer's launcher is about to start, until the ranks have met."""
        if lightning_process.starts_processes(launcher):
            threading.Thread(target=self._watch_start, args=(launcher,), name="ranks start", daemon=True).start()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start watching. The process group exists now."""
        self._met.set()
        self._ending = False  # a rollback gives the run a new trainer
        if trainer.world_size == 1 or self._store is not None:
            return
        self.take_over(trainer.strategy.launcher)
        self._rank, self._world = trainer.global_rank, trainer.world_size
        store = torch_private.default_store()
        # A second connection: a wait may hold the main thread's for its whole duration.
        self._store = dist.PrefixStore("ranks", store.clone())
        self._store.set(str(self._rank), "1")
        self._over = threading.Event()
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"ranks {target.__name__}", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching: this rank's part is done."""
        self.close()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note that the step begins: its data has come."""
        self._step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Note that the step is over. A save, a validation or the wait for data may follow, for any time."""
        self._step = 0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note that this rank is ending, and may need time to save."""
        self._ending, self._step = True, 0

    def explain(self, error: BaseException) -> BaseException:
        """Return the error that counts: a lost rank's if `error` is a torn connection to it, else `error`.

        In the latter case the other ranks are told of it. Call it at the end of the process: no rank is watched any
        more.
        """
        self._met.set()
        if self._store is None:
            return error
        self._ending = True
        lost = self._lost_with_connection() if _is_connection(error) else None
        if lost is None:
            code = error.exit_code if isinstance(error, RunError) else 1
            words = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            self._to_post = json.dumps({"rank": self._rank, "message": words.splitlines()[0], "exit_code": code})
            self._over.wait(2 * _BEAT_SECONDS)  # until all can have read it: the store ends with rank 0
        elif self._rank:  # rank 0 prints its error itself; this process may soon be ended
            print(harmless(f"rank {self._rank}: {lost}"), file=sys.stderr, flush=True)
        self.close()
        return lost or error

    def close(self) -> None:
        """Stop watching, and mark this rank as ended, so that its silence counts for nothing."""
        self._met.set()
        if self._store is not None:
            self._over.set()
            if not self._store_lost:
                with suppress(RuntimeError):
                    self._store.add(str(self._rank), _ENDED)
                    self._wait_for_others()
            self._store = None

    def _wait_for_others(self) -> None:
        """Wait on rank 0 for ranks that are about to leave too. Their connections end with its process."""
        until = time.monotonic() + GRACE_SECONDS
        while not self._rank and time.monotonic() < until and self._lost() is None:
            if all(self._store.add(str(rank), 0) < 0 for rank in range(self._world)):
                return
            time.sleep(0.05)

    def take_over(self, launcher: object) -> None:
        """Take the processes that a Trainer's launcher has started out of its list, and watch them here."""
        for child in lightning_process.take_processes(launcher):
            self.children.append(child)

    def end_children(self) -> None:
        """Kill the ranks that this one has started: they may wait in a collective for it, which has failed.

        Lightning 2.6 does so only after a KeyboardInterrupt.
        """
        for child in self.children:
            child.kill()

    # ---- threads -------------------------------------------------------------------------------------------------

    def _watch_start(self, launcher: object) -> None:
        """End this process if one that it has started ends before the ranks have met.

        The main thread may be waiting for that one in a call that no signal reaches.
        """
        ended = None
        while ended is None and not self._met.wait(_START_BEAT_SECONDS):
            self.take_over(launcher)
            ended = next(((i, child) for i, child in enumerate(self.children, 1) if child.poll()), None)
        if ended is not None:
            self._follow(ended[0], ended[1].pid, ended[1].returncode)

    def _follow(self, rank: int, process: int, code: int) -> None:
        signum = STOPPED.get(code, -code if -code in signals.SIGNALS else None)  # below 0: it had no handlers yet
        if signum is not None:
            os.kill(os.getpid(), signum)  # as if this process had received it
            if self._met.wait(GRACE_SECONDS):
                return
            self._leave(Stopped(signal.SIGTERM if signum in signals.LIKE_SIGTERM else signum))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._leave(RankLost(f"rank {rank} (process {process}) {how}", max(code, 1)))

    def _beat(self) -> None:
        """Count upwards in the store, read the others' counts, and post this rank's error if there is one."""
        store, over = self._store, self._over
        try:
            while not over.wait(_BEAT_SECONDS):
                store.add(str(self._rank), 1)
                if self._to_post is not None:
                    store.compare_set("failed", "", self._to_post)
                self._counts = [store.add(str(rank), 0) for rank in range(self._world)]
                self._share_place(store)
                if self._failure is None and store.check(["failed"]):
                    failed = json.loads(store.get("failed"))
                    if failed["rank"] != self._rank:
                        self._failure = RankLost(
                            f"rank {failed['rank']} failed: {failed['message']}", failed["exit_code"]
                        )
        except (RuntimeError, ValueError):  # the connection to rank 0, which holds the store
            self._store_lost = True

    def _share_place(self, store: Any) -> None:
        """Write where this main thread is, and read where the others' are."""
        own = Place(self._step, collectives.entered())
        store.set(f"place-{self._rank}", json.dumps(own))
        keys = [f"place-{rank}" for rank in range(self._world)]
        if store.check(keys):
            self._places = [Place(*json.loads(store.get(key))) for key in keys]

    def _watch(self) -> None:
        """Check once a second whether all ranks are alive.

        Seconds are counted in this thread, so the time for which a whole job was stopped does not count.
        """
        over, before, silence, waited = self._over, [0] * self._world, [0.0] * self._world, 0.0
        stragglers = Stragglers(self._world, STUCK_SECONDS)
        while not over.wait(_BEAT_SECONDS):
            counts = self._counts or before
            for rank, (new, old) in enumerate(zip(counts, before, strict=True)):
                silent = new == old and new > 0  # 0: not begun; below: ended
                silence[rank] = silence[rank] + _BEAT_SECONDS if silent else 0.0
            before = counts
            lost = self._lost()
            waited = 0.0 if lost is None else waited + _BEAT_SECONDS
            if lost is not None and waited > (LIFE_SECONDS if self._ending else GRACE_SECONDS):
                self._leave(lost)
            if self._places and (stuck := stragglers.look(self._places, _BEAT_SECONDS)) is not None:
                where = f"stuck in step {self._places[stuck].step} for {STUCK_SECONDS:.0f} s"
                self._leave(RankLost(f"rank {stuck} has been {where}, and the others wait for it"))
            # If the store does not answer, all ranks seem silent: then it is rank 0, which holds the store.
            if lost is None and max(silence) > LIFE_SECONDS:
                self._leave(RankLost(f"rank {silence.index(max(silence))} has shown no life for {LIFE_SECONDS:.0f} s"))

    def _lost(self) -> RankLost | None:
        """Return a rank that is known to have failed, or to be failing; None: none is."""
        for i, child in enumerate(self.children):
            if (code := child.poll()) is not None and code < 0:
                return RankLost(f"rank {self._rank + 1 + i} (process {child.pid}) was killed by signal {-code}")
        if self._failure is not None:
            return self._failure
        for i, child in enumerate(self.children):
            if code := child.poll():
                return RankLost(f"rank {self._rank + 1 + i} (process {child.pid}) ended with exit code {code}")
        return RankLost("rank 0 is gone") if self._store_lost else None

    def _lost_with_connection(self) -> RankLost | None:
        """Return the rank whose end has broken a connection. It is known in a moment, or not at all."""
        self._over.wait(2 * _BEAT_SECONDS)  # the last count of a rank may still be under way
        before, until = self._counts, time.monotonic() + GRACE_SECONDS
        while (lost := self._lost()) is None and time.monotonic() < until:
            time.sleep(0.1)
        quiet = [rank for rank, (new, old) in enumerate(zip(self._counts, before, strict=False)) if new == old > 0]
        if lost is None and quiet:
            lost = RankLost(f"rank {quiet[0]} is gone")
        return lost

    def _leave(self, error: RunError) -> None:
        print(harmless(f"rank {self._rank}: {error}"), file=sys.stderr, flush=True)
        writer = threading.Thread(target=self.on_lost, args=(error,), daemon=True)
        writer.start()
        writer.join(ON_LOST_SECONDS)
        self.end_children()
        os._exit(error.exit_code)


def _is_connection(error: BaseException) -> bool:
    """Return whether an error is of the connection between ranks. gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
