"""Which checkpoints a run takes, and when. `checkpoint/tracker.py` and the writer do the rest.

Saving is collective: every rank comes here at the same step, and rank 0 copies the state and writes it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from gpt2_fp8.checkpoint.tracker import CheckpointTracker, Intervals, is_validation_due
from gpt2_fp8.checkpoint.writer import Writer
from gpt2_fp8.compat import lightning_private as loops
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.schema import CallbacksConfig
from gpt2_fp8.runtime import collectives

log = logging.getLogger(__name__)


class Checkpointing(Checkpoint):
    """Saves every `every_n_steps` optimizer steps, by the clock, at the end, and at every lowest finite `val_loss`.

    Args:
        folder: holds the checkpoints, `last.json` and `best.json`.
        every_n_steps: the interval in steps; 0: not by steps.
        keep: how many of the newest are kept (at least one), in addition to the best.
        every_minutes: also save this long after the last checkpoint; 0: not by the clock.
        keep_every_n_steps: also save at multiples of this, and keep these for good; 0: none.
        asynchronous: write in a thread while training goes on; the step waits only for a copy in host memory.

    Attributes:
        tracker: what this rank knows of the checkpoints and validations.
        longest_stall: the most seconds that training has waited for a checkpoint, in all `fit`s; None before one. It
            waits for the GPU, the ranks, the checkpoint before it and the copy; without a thread also for the disk.

    A checkpoint at the end of a step whose validation is still due resumes into that validation.
    """

    def __init__(
        self,
        folder: Path,
        every_n_steps: int,
        keep: int,
        every_minutes: float = 0.0,
        keep_every_n_steps: int = 0,
        asynchronous: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.intervals = Intervals(every_n_steps, every_minutes, keep_every_n_steps)
        self.writer = Writer(self.folder, keep, self.intervals.is_permanent, asynchronous)
        self.tracker = CheckpointTracker(self.writer)
        self.longest_stall: float | None = None
        self._prepared = False  # the writer knows the state that it will get
        self._leaving = False  # an exception ends the run: nothing waits for a checkpoint that is taken from now on

    @classmethod
    def from_config(cls, folder: Path, config: CallbacksConfig) -> Checkpointing:
        """Make it from `callbacks` of a run's configuration; `folder` is that of the checkpoints."""
        return cls(
            folder,
            config.checkpoint_every_n_steps,
            config.keep_checkpoints,
            every_minutes=config.checkpoint_every_minutes,
            keep_every_n_steps=config.keep_every_n_steps,
            asynchronous=config.async_checkpoints,
        )

    def save(self, trainer: Trainer) -> bool:
        """Save the present step, unless that was done already. Collective. Returns whether it is saved.

        A checkpoint that is still being written counts as saved. Outside `fit` there is nothing to resume from, so
        nothing is saved. An OSError (a full disk) becomes a warning.
        """
        step = trainer.global_step
        if self.tracker.requested_step == step:
            return True
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or step == 0:
            return False
        self.intervals.restart_clock()
        self.tracker.validation_due = self.tracker.validated_step != step and loops.is_validation_due(trainer)
        # Lightning gathers the state, and gives it to its CheckpointIO on rank 0. Of what that is to do with it,
        # `storage_options` is all that `save_checkpoint` passes on.
        save = partial(trainer.save_checkpoint, weights_only=False, storage_options=partial(self._write, trainer))
        with self._measure_stall():
            if trainer.is_global_zero and hasattr(trainer.strategy, "copy_to_host"):
                self.writer.begin_copy()
                trainer.strategy.copy_to_host = self.writer.copy
            return self.tracker.request(step, save, trainer.strategy.broadcast)

    def save_now(self, trainer: Trainer) -> bool:
        """Save and wait for the disk, at the end of a run. Collective. Returns whether the step is there."""
        if not self.save(trainer):
            return False
        self.writer.wait()
        self.tracker.sync(trainer.strategy.broadcast)
        return self.tracker.saved_step == trainer.global_step

    def _write(self, trainer: Trainer, path: Path, checkpoint: dict[str, Any]) -> None:
        """Give the state to the writer: on rank 0, in `Trainer.save_checkpoint`, where the other ranks wait.

        The logs are flushed first: a run that continues from the checkpoint logs only the steps after it.
        """
        pointer = self.tracker.pointer(trainer.global_step)
        try:
            _flush_loggers(trainer)
        except OSError as error:
            self.writer.fail(pointer.step, error)
            return
        self.writer.save(checkpoint, pointer)
        if self._leaving:
            self.writer.close()

    @contextmanager
    def _measure_stall(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.longest_stall = max(self.longest_stall or 0.0, time.perf_counter() - began)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier `fit`. After this, Lightning restores what a checkpoint has of it."""
        if stage == "fit":
            self.tracker.reset()
            self._prepared = self._leaving = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tidy the folder, and trust its `best.json` before the checkpoint's state, which may be older.

        Lightning has restored this callback by now. It gets here also if nothing is left to train.
        """
        if trainer.is_global_zero:
            saved_step = self.tracker.saved_step
            self.writer.begin(saved_step, self.tracker.best)
            if 0 < trainer.max_steps <= (saved_step or 0):
                log.info("already complete: step %d of %d is saved", saved_step, trainer.max_steps)
        self.tracker.sync(trainer.strategy.broadcast)
        self.intervals.restart_clock()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save at the intervals, and at the last step."""
        if not self._prepared:
            self._prepare(trainer, pl_module)
        self.writer.check()
        if loops.is_last_step(trainer) or self.intervals.is_due(trainer.global_step, partial(_broadcast, trainer)):
            self.save(trainer)

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the writer what it will get: after the first step there are moments, and CUDA graphs are recorded."""
        state = pl_module.state_dict()  # on all ranks: it settles the step
        if trainer.is_global_zero:
            step = getattr(pl_module, "step", None)  # the average of the weights
            more = [] if step is None else [step.state_dict()]
            self.writer.prepare([state, *more, *(optimizer.state_dict() for optimizer in trainer.optimizers)])
        self._prepared = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the result of a saved step. If it is the best so far, save the step and let `best.json` name it."""
        if trainer.sanity_checking:
            return
        step, metric = trainer.global_step, trainer.callback_metrics.get("val_loss")
        if self.tracker.is_best_pending():
            with self._measure_stall():
                self.writer.wait()  # the best that it is compared with must be on the disk
        # Without sync_dist every rank has another value, but all ranks must save, or none.
        value = self.tracker.sync(trainer.strategy.broadcast, math.nan if metric is None else float(metric))
        better = self.tracker.add_validation(step, value, partial(self.save, trainer))
        if self.tracker.requested_step == step and trainer.is_global_zero:
            try:
                _flush_loggers(trainer)
            except OSError as error:
                log.warning("the validation of step %d could not be noted in %s: %s", step, self.folder, error)
            else:
                self.writer.note(self.tracker.pointer(step), better)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end if it is not saved yet, and wait for it. Raises RunError if that fails."""
        if trainer.global_step and not any(self.save_now(trainer) for _ in range(2)):
            raise RunError(f"the end of the run (step {trainer.global_step}) could not be saved in {self.folder}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish what is being written. An error of the writer does not hide `exception`."""
        self._leaving = True
        try:
            # Unlocking memory may wait for a GPU, and that for a rank that is gone.
            self.writer.wait() if collectives.is_distributed() else self.writer.close()
        except Exception as error:
            log.error("a checkpoint was lost: %s: %s", type(error).__name__, error)
        if trainer.is_global_zero:
            self.tracker.sync(lambda own: own)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish what is being written: the end of a `fit`, or the note of a validation after it."""
        self.writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of validations."""
        return self.tracker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was known of validations."""
        self.tracker.load_state_dict(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Have Lightning run the validation that was due at the checkpoint, unless it was done later.

        Lightning calls this before it gives `checkpoint` to the loops and to `load_state_dict`.
        """
        state, path = checkpoint["callbacks"].get(self.state_key), Path(str(trainer.ckpt_path))
        if path.parent.resolve() == self.folder.resolve():
            self.tracker.resume(checkpoint["global_step"])
        if state and is_validation_due(state, path, checkpoint["global_step"]):
            loops.resume_into_validation(checkpoint["loops"]["fit_loop"])


def _flush_loggers(trainer: Trainer) -> None:
    """Have every logger put on the disk what it holds. One that cannot do only this saves. Raises OSError."""
    for logger in trainer.loggers:
        getattr(logger, "flush", logger.save)()


def _broadcast(trainer: Trainer, own: bool) -> bool:
    """Return rank 0's `own` on every rank. Collective. The strategy's own way would wait for the GPU."""
    return collectives.any_rank(own and trainer.is_global_zero)
