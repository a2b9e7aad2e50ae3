"""The processes of one run watch each other, under Lightning. If one is gone or shows no life, all end and name it.

`runtime.rank_watch` judges. Here it is told when the ranks have met, what the main thread does, and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gpt2_fp8.compat import lightning_process
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.runtime import activity
from gpt2_fp8.runtime.rank_end import RankEnd
from gpt2_fp8.runtime.rank_start import RankStart
from gpt2_fp8.runtime.rank_watch import RankWatch


class RankWatchdog(Callback):
    """Ends this process if another rank is lost. Does nothing if there is only one rank.

    Args:
        on_lost: called with the error before a thread ends the process: see `RankEnd`.
        agent: which has the store in which the ranks meet, as a message names it; None: rank 0 has.

    After `fit` has raised, the caller asks `explain` for the error that counts.
    """

    def __init__(self, on_lost: Callable[[RunError], Any] = lambda error: None, agent: str | None = None) -> None:
        self._agent = agent
        self._end = RankEnd(on_lost)
        self._launcher: object = None  # which starts the other ranks of this machine, if anything of ours does
        self._start = RankStart(self._end, lambda: self.take_over(self._launcher))
        self._watch: RankWatch | None = None  # while the ranks are watched

    def expect(self, launcher: object) -> None:
        """Watch the processes that a Trainer's launcher is about to start, until the ranks have met."""
        self._launcher = launcher
        if lightning_process.starts_processes(launcher):
            self._start.watch()

    def have_met(self, launcher: object, store: Any, rank: int, world_size: int) -> None:
        """Watch the ranks that have met in `store`, if nobody does yet. `launcher` may have started some from here."""
        self._start.met.set()
        if self._watch is None:
            self.take_over(launcher)
            self.watch(store, rank, world_size)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note that this rank is not ending: a rollback gives the run a new trainer."""
        if self._watch is not None:
            self._watch.ending = False

    def watch(self, store: Any, rank: int, world_size: int) -> None:
        """Watch the ranks that have met in `store`, a `torch.distributed.Store`, from now on."""
        self._end.rank = rank
        self._watch = RankWatch(store, rank, world_size, self._end, self._agent)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note that the step begins: its data has come."""
        activity.begin(f"in step {trainer.global_step + 1}")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Note that the step is over. A save, a validation or the wait for data may follow."""
        activity.begin(f"after step {trainer.global_step}")

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note that a batch of a validation begins."""
        activity.begin(f"in the validation after step {trainer.global_step}")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Note that a validation is over."""
        activity.begin(f"after step {trainer.global_step}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note that this rank is ending, and may need time to save."""
        activity.begin(f"at its end, after step {trainer.global_step}")
        if self._watch is not None:
            self._watch.ending = True

    def explain(self, error: BaseException) -> BaseException:
        """Return the error that counts: a lost rank's if `error` is a torn connection to it, else `error`.

        In the latter case the other ranks are told of it. Call it at the end of the process: no rank is watched any
        more.
        """
        self._start.met.set()
        lost = None if self._watch is None else self._watch.explain(error)
        self.close()
        return lost or error

    def close(self) -> None:
        """Stop watching: this rank has come to its end."""
        self._start.met.set()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def take_over(self, launcher: object) -> None:
        """Take the processes that a Trainer's launcher has started out of its list, and watch them here."""
        self._end.children.extend(lightning_process.take_processes(launcher))

    def end_children(self) -> None:
        """Kill the ranks that this one has started."""
        self._end.kill_children()
