"""The processes of one run watch each other: one that is gone, or shows no life, ends all of them, and says which.

A rank that waits in a collective for another waits until the process group's timeout, half an hour, and NCCL's wait
cannot be interrupted. So every rank has a thread that counts upwards in the store through which the ranks have met. It
counts during a compilation, a download or a save too: only a process that is gone, stopped or frozen does not. Where
the main threads stand goes the same way, and tells of one that hangs in a step (`stragglers`).
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

LIFE_SECONDS = 60.0  # that a rank may show no life
STUCK_SECONDS = 600.0  # that the others may wait for a rank in the midst of a step: one of them may compile for itself
GRACE_SECONDS = 5.0  # for this rank to end by itself, as all do where all see the same error
FAREWELL_SECONDS = 10.0
STOPPED = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM)}  # exit codes, and what they come of
_BEAT, _START_BEAT = 1.0, 0.2
_ENDED = -(1 << 40)  # a count from which no beat leads above zero


class RankLost(RunError):
    """Another rank has ended, or shows no life. `exit_code` is that rank's where it has said one, else 1."""

    def __init__(self, message: str, exit_code: int = 1):
        self.exit_code = exit_code
        if exit_code in STOPPED:
            self.status = Stopped.status
        super().__init__(f"{message}; under the same run_name, ckpt_path=last continues")


class RankWatchdog(Callback):
    """Ends this process when another rank is lost. Does nothing where there is one rank.

    Args:
        farewell: called with the error before the process leaves from a thread, as the main thread hangs in a
            collective: for the summary. It has `FAREWELL_SECONDS`.

    Whoever catches what `fit` raised asks `explain` for the error that counts.
    """

    def __init__(self, farewell: Callable[[RunError], Any] = lambda error: None) -> None:
        self.farewell = farewell
        self.children: list[subprocess.Popen[bytes]] = []  # the ranks that Lightning has started from this one
        self._rank, self._world = 0, 1
        self._store: Any = None
        self._over = threading.Event()
        self._met = threading.Event()  # the ranks have, or never will
        self._ending = False
        self._to_post: str | None = None
        self._failure: RankLost | None = None  # of another rank, in its own words
        self._counts: list[int] = []  # each rank's beats, as last read
        self._step = 0  # in which the main thread is; 0: between two
        self._places: list[Place] = []  # each rank's, as last read
        self._store_lost = False

    def expect(self, launcher: object) -> None:
        """From here on watch the processes that a Trainer's launcher is about to start, until the ranks have met."""
        if lightning_process.starts_processes(launcher):
            threading.Thread(target=self._watch_start, args=(launcher,), name="ranks start", daemon=True).start()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start watching; the process group is there."""
        self._met.set()
        self._ending = False  # after a rollback, a run's next trainer
        if trainer.world_size == 1 or self._store is not None:
            return
        self.take_over(trainer.strategy.launcher)
        self._rank, self._world = trainer.global_rank, trainer.world_size
        store = torch_private.default_store()
        # A connection of its own: the main thread's may be held for as long as a wait takes.
        self._store = dist.PrefixStore("ranks", store.clone())
        self._store.set(str(self._rank), "1")
        self._over = threading.Event()
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"ranks {target.__name__}", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching: this rank's part is done."""
        self.close()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """The step begins: its data has come."""
        self._step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """What comes next, a save, a validation or the wait for data, takes its time."""
        self._step = 0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """From here on this rank is on its way out, and takes its time to save."""
        self._ending, self._step = True, 0

    def explain(self, error: BaseException) -> BaseException:
        """`error`, and the other ranks are told of it; or where it is a torn connection to a lost rank, that loss.

        For the end of the process: nobody is watched any more.
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
            self._over.wait(2 * _BEAT)  # until all can have read it: with rank 0 the store ends
        elif self._rank:  # rank 0 says its error itself, and may have no time to
            print(harmless(f"rank {self._rank}: {lost}"), file=sys.stderr, flush=True)
        self.close()
        return lost or error

    def close(self) -> None:
        """Stop watching, and say that this rank's silence is no cause for alarm."""
        self._met.set()
        if self._store is not None:
            self._over.set()
            if not self._store_lost:
                with suppress(RuntimeError):
                    self._store.add(str(self._rank), _ENDED)
                    self._see_off()
            self._store = None

    def _see_off(self) -> None:
        """On rank 0, whose process has the store: wait a while for those that are about to leave as well, whose
        connections would else break under their hands."""
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
        """End the ranks that this one has started: they may wait in a collective for it, which has failed. Lightning
        2.6 does so after a KeyboardInterrupt alone."""
        for child in self.children:
            child.kill()

    # ---- threads -------------------------------------------------------------------------------------------------

    def _watch_start(self, launcher: object) -> None:
        """End this process with one that it has started and that ends before the ranks have met. The main thread may be
        waiting for it where no signal reaches it."""
        ended = None
        while ended is None and not self._met.wait(_START_BEAT):
            self.take_over(launcher)
            ended = next(((i, child) for i, child in enumerate(self.children, 1) if child.poll()), None)
        if ended is not None:
            self._follow(ended[0], ended[1].pid, ended[1].returncode)

    def _follow(self, rank: int, process: int, code: int) -> None:
        signum = STOPPED.get(code, -code if -code in signals.SIGNALS else None)  # below 0: it had no handlers yet
        if signum is not None:
            os.kill(os.getpid(), signum)  # as one to this process would
            if self._met.wait(GRACE_SECONDS):
                return
            self._leave(Stopped(signal.SIGTERM if signum in signals.LIKE_SIGTERM else signum))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._leave(RankLost(f"rank {rank} (process {process}) {how}", max(code, 1)))

    def _beat(self) -> None:
        """Count upwards in the store, read the others' counts, and pass on what is to be posted."""
        store, over = self._store, self._over
        try:
            while not over.wait(_BEAT):
                store.add(str(self._rank), 1)
                if self._to_post is not None:
                    store.compare_set("failed", "", self._to_post)
                self._counts = [store.add(str(rank), 0) for rank in range(self._world)]
                self._tell_place(store)
                if self._failure is None and store.check(["failed"]):
                    told = json.loads(store.get("failed"))
                    if told["rank"] != self._rank:
                        self._failure = RankLost(f"rank {told['rank']} failed: {told['message']}", told["exit_code"])
        except (RuntimeError, ValueError):  # the connection to rank 0, which has the store
            self._store_lost = True

    def _tell_place(self, store: Any) -> None:
        """Say where the main thread is, and read where the others' are."""
        own = Place(self._step, collectives.entered())
        store.set(f"place-{self._rank}", json.dumps(own))
        keys = [f"place-{rank}" for rank in range(self._world)]
        if store.check(keys):
            self._places = [Place(*json.loads(store.get(key))) for key in keys]

    def _watch(self) -> None:
        """Once a second, look whether all are there. Seconds are this thread's own: those for which a whole job was
        stopped, to go on later, do not count."""
        over, before, silence, waited = self._over, [0] * self._world, [0.0] * self._world, 0.0
        stragglers = Stragglers(self._world, STUCK_SECONDS)
        while not over.wait(_BEAT):
            counts = self._counts or before
            for rank, (new, old) in enumerate(zip(counts, before, strict=True)):
                silence[rank] = 0.0 if new != old or new <= 0 else silence[rank] + _BEAT  # 0: not begun; below: ended
            before = counts
            lost = self._lost()
            waited = 0.0 if lost is None else waited + _BEAT
            if lost is not None and waited > (LIFE_SECONDS if self._ending else GRACE_SECONDS):
                self._leave(lost)
            if self._places and (stuck := stragglers.look(self._places, _BEAT)) is not None:
                where = f"stuck in step {self._places[stuck].step} for {STUCK_SECONDS:.0f} s"
                self._leave(RankLost(f"rank {stuck} has been {where}, and the others wait for it"))
            # Where the store does not answer all seem silent, and it is rank 0, which has it, that is.
            if lost is None and max(silence) > LIFE_SECONDS:
                self._leave(RankLost(f"rank {silence.index(max(silence))} has shown no life for {LIFE_SECONDS:.0f} s"))

    def _lost(self) -> RankLost | None:
        """A rank that is known to have ended, or to be ending, for no good reason."""
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
        """Which rank's end has broken a connection: it is known in a moment, or no longer counts."""
        self._over.wait(2 * _BEAT)  # a count that was on its way
        before, until = self._counts, time.monotonic() + GRACE_SECONDS
        while (lost := self._lost()) is None and time.monotonic() < until:
            time.sleep(0.1)
        quiet = [rank for rank, (new, old) in enumerate(zip(self._counts, before, strict=False)) if new == old > 0]
        if lost is None and quiet:
            lost = RankLost(f"rank {quiet[0]} is gone")
        return lost

    def _leave(self, error: RunError) -> None:
        print(harmless(f"rank {self._rank}: {error}"), file=sys.stderr, flush=True)
        farewell = threading.Thread(target=self.farewell, args=(error,), daemon=True)
        farewell.start()
        farewell.join(FAREWELL_SECONDS)
        self.end_children()
        os._exit(error.exit_code)


def _is_connection(error: BaseException) -> bool:
    """Whether an error is of the connection between ranks; gloo's have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
