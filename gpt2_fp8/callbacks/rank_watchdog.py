"""The processes of one run watch each other. If one is gone or shows no life, all of them end and name it.

A rank that waits in a collective for a lost one waits until the process group's timeout, half an hour. NCCL's wait
cannot be interrupted. So every rank has a thread that gives signs of life (`runtime.heartbeats`), and one that judges
those of the others. The positions of the main threads show one that hangs in a step (`runtime.stragglers`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gpt2_fp8.compat import lightning_process, torch_private
from gpt2_fp8.config.errors import Diverged, RunError, Stopped, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import collectives, peer, process_end
from gpt2_fp8.runtime.heartbeats import BEAT_SECONDS, Heartbeats
from gpt2_fp8.runtime.stragglers import Place, Stragglers

LIFE_SECONDS = 60.0  # without a beat, after which a rank counts as lost
STUCK_SECONDS = 540.0  # that the others may wait for a rank in the middle of a step: it may be compiling
GRACE_SECONDS = 5.0  # for this rank to end by itself, as all ranks do that see the same error
ON_LOST_SECONDS = 10.0  # for `on_lost`
STOPPED = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM)}  # {exit code: the signal behind it}
_START_BEAT_SECONDS = 0.2


class RankLost(RunError):
    """Another rank has ended, or shows no life. `exit_code` is that rank's if it is known, else 1.

    Attributes:
        rank: which; None: a launcher's process, not a rank.
        silent: whether its process may still be there.
    """

    def __init__(self, rank: int | None, how: str, exit_code: int = 1, silent: bool = False):
        self.rank, self.silent, self.exit_code = rank, silent, exit_code
        self.teller = 1 if rank == 0 else 0  # the first that is not lost
        self.cause = how if rank is None else f"rank {rank} {how}"
        if exit_code in STOPPED:
            self.status = Stopped.status
        # A run that was refused, or has diverged, does not go on by the same words.
        super().__init__(self.cause, lead=None if exit_code in (UserError.exit_code, Diverged.exit_code) else "; ")


class RankWatchdog(Callback):
    """Ends this process if another rank is lost. Does nothing if there is only one rank.

    Args:
        on_lost: called with the error before a thread ends the process, whose main thread hangs in a collective. It
            tells how the run goes on, and writes the summary, within `ON_LOST_SECONDS`.
        of_agent: whether the store in which the ranks meet is that of torchrun's agent, not rank 0's.

    After `fit` has raised, the caller asks `explain` for the error that counts.
    """

    def __init__(self, on_lost: Callable[[RunError], Any] = lambda error: None, of_agent: bool = False) -> None:
        self.on_lost, self._of_agent = on_lost, of_agent
        self.children: list[subprocess.Popen[bytes]] = []  # the ranks that Lightning has started from this one
        self._ranks: Heartbeats | None = None  # while they are watched
        self._rank = 0
        self._met = threading.Event()  # the ranks have met, or never will
        self._ending = False
        self._leaving = threading.Event()  # a thread is ending this process, and says why
        self._step = 0  # the step that the main thread is in; 0: between two

    def expect(self, launcher: object) -> None:
        """Watch the processes that a Trainer's launcher is about to start, until the ranks have met."""
        if lightning_process.starts_processes(launcher):
            threading.Thread(target=self._watch_start, args=(launcher,), name="ranks start", daemon=True).start()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start watching. The process group exists now."""
        self._met.set()
        self._ending = False  # a rollback gives the run a new trainer
        if trainer.world_size == 1 or self._ranks is not None:
            return
        self.take_over(trainer.strategy.launcher)
        self.watch(torch_private.default_store(), trainer.global_rank, trainer.world_size)

    def watch(self, store: Any, rank: int, world_size: int) -> None:
        """Watch the ranks that have met in `store`, a `torch.distributed.Store`, from now on."""
        self._rank = rank
        self._ranks = Heartbeats(store, rank, world_size, self._place)
        threading.Thread(target=self._watch, args=(self._ranks,), name="ranks watch", daemon=True).start()

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
        ranks = self._ranks
        if ranks is None:
            return error
        self._ending = True
        lost = self._lost_with_connection(ranks) if _is_connection(error) else None
        while self._leaving.is_set():  # until the thread is done: the same end is not to be told twice
            time.sleep(BEAT_SECONDS)
        if lost is None:
            code = error.exit_code if isinstance(error, RunError) else 1
            words = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            ranks.tell(words.splitlines()[0], code)
        self.close()
        return lost or error

    def close(self) -> None:
        """Stop watching: this rank has come to its end."""
        self._met.set()
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        ranks.end()
        # Rank 0 waits for ranks that are about to leave too. Their connections end with its process.
        until = time.monotonic() + GRACE_SECONDS
        while not self._rank and time.monotonic() < until and self._lost(ranks) is None and not ranks.all_ended():
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
        signum = STOPPED.get(code, -code if -code in process_end.SIGNALS else None)  # below 0: it had no handlers yet
        if signum is not None:
            os.kill(os.getpid(), signum)  # as if this process had received it
            if self._met.wait(GRACE_SECONDS):
                return
            self._leave(Stopped(signal.SIGTERM if signum in process_end.LIKE_SIGTERM else signum))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._leave(RankLost(rank, f"(process {process}) {how}", max(code, 1)))

    def _place(self) -> Place:
        """Return where this main thread is."""
        return Place(self._step, collectives.entered())

    def _watch(self, ranks: Heartbeats) -> None:
        """Check once a second whether all ranks are alive.

        Seconds are counted in this thread, so the time for which a whole job was stopped does not count.
        """
        before, silence, waited = [0] * ranks.world_size, [0.0] * ranks.world_size, 0.0
        stragglers = Stragglers(ranks.world_size, STUCK_SECONDS)
        while not ranks.over.wait(BEAT_SECONDS):
            counts = ranks.counts or before
            for rank, (new, old) in enumerate(zip(counts, before, strict=True)):
                silent = new == old and new >= 0  # below: ended
                silence[rank] = silence[rank] + BEAT_SECONDS if silent else 0.0
            before = counts
            lost = self._lost(ranks)
            waited = 0.0 if lost is None else waited + BEAT_SECONDS
            saves = self._ending or (lost is not None and lost.rank is None)  # without an agent, ranks can still save
            if lost is not None and waited > (LIFE_SECONDS if saves else GRACE_SECONDS):
                self._leave(lost)
            if ranks.places and (stuck := stragglers.look(ranks.places, BEAT_SECONDS)) is not None:
                where = f"stuck in step {ranks.places[stuck].step} for {STUCK_SECONDS:.0f} s"
                self._leave(RankLost(stuck, f"has been {where}, and the others wait for it"))
            if lost is None and (longest := max(silence)) > LIFE_SECONDS:
                how = f"has shown no life for {LIFE_SECONDS:.0f} s"
                if silence[self._rank] == longest:  # all ranks seem silent: the store does not answer
                    self._leave(self._lost_with_store(how, silent=True))
                self._leave(RankLost(silence.index(longest), how, silent=True))

    def _lost(self, ranks: Heartbeats | None) -> RankLost | None:
        """Return a rank that is known to have failed, or to be failing; None: none is."""
        for i, child in enumerate(self.children):
            if (code := child.poll()) is not None and code < 0:
                return RankLost(self._rank + 1 + i, f"(process {child.pid}) was killed by signal {-code}")
        if ranks is not None and (told := ranks.failure):
            return RankLost(told.rank, f"failed: {told.message}", told.exit_code)
        for i, child in enumerate(self.children):
            if code := child.poll():
                return RankLost(self._rank + 1 + i, f"(process {child.pid}) ended with exit code {code}")
        return self._lost_with_store("is gone") if ranks is not None and ranks.lost else None

    def _lost_with_store(self, how: str, silent: bool = False) -> RankLost:
        return RankLost(None, f"torchrun's agent {how}") if self._of_agent else RankLost(0, how, silent=silent)

    def _lost_with_connection(self, ranks: Heartbeats) -> RankLost | None:
        """Return the rank whose end has broken a connection. It is known in a moment, or not at all."""
        ranks.over.wait(2 * BEAT_SECONDS)  # the last count of a rank may still be under way
        before, until = ranks.counts, time.monotonic() + GRACE_SECONDS
        while (lost := self._lost(ranks)) is None and time.monotonic() < until:
            time.sleep(0.1)
        quiet = [rank for rank, (new, old) in enumerate(zip(ranks.counts, before, strict=False)) if new == old > 0]
        if lost is None and quiet:
            lost = RankLost(quiet[0], "is gone")
        return lost

    def _leave(self, error: RunError) -> None:
        """End this process, whatever its main thread does. Does not return."""
        self._leaving.set()
        try:
            if self._ranks is not None and isinstance(error, RankLost):  # else they only learn that this one is gone
                self._ranks.tell(error.cause, error.exit_code)
            writer = threading.Thread(target=self.on_lost, args=(error,), daemon=True)
            writer.start()
            writer.join(ON_LOST_SECONDS)
            # A rank that refuses its input says so itself.
            if error.exit_code != UserError.exit_code and error.teller in (None, self._rank):
                print(harmless(f"rank {self._rank}: {error}"), file=sys.stderr, flush=True)
            self._end_silent(error)
        finally:
            self.end_children()
            os._exit(error.exit_code)

    def _end_silent(self, error: RunError) -> None:
        """Kill a rank without a sign of life, if it is on this host: its launcher would wait for it."""
        if isinstance(error, RankLost) and error.silent and error.rank is not None and self._ranks is not None:
            process = self._ranks.peers[error.rank] if self._ranks.peers else None
            if process is not None:
                peer.kill(process)


def _is_connection(error: BaseException) -> bool:
    """Return whether an error is of the connection between ranks. gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
