"""Which checkpoints a run takes, and when. `checkpoint/ledger.py` and the writer do the rest.

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

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.errors import escaped
from gpt2_fp8.checkpoint.intervals import Intervals, KeptSteps
from gpt2_fp8.checkpoint.ledger import Ledger
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Writer, finite
from gpt2_fp8.compat import lightning_loops as loops
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.schema import CallbacksConfig
from gpt2_fp8.runtime import activity

log = logging.getLogger(__name__)


class Checkpointing(Checkpoint):
    """Saves every `every_n_steps` optimizer steps, by the clock, at the end, and at every best validation.

    Args:
        folder: holds the checkpoints, `last.json` and `best.json`.
        every_n_steps: the interval in steps; 0: not by steps.
        keep: how many of the newest are kept (at least one), in addition to the best.
        monitor: the metric whose lowest finite value is the best.
        every_minutes: also save this long after the last checkpoint; 0: not by the clock.
        keep_every_n_steps: also save at multiples of this, and keep these for good; 0: none.
        asynchronous: write in a thread while training goes on; the step waits only for a copy in host memory.

    Attributes:
        best: a Pointer, or None.
        saved_step: of the newest checkpoint in the folder that this process has written or resumed from, as far as
            this rank knows.
        validated_step: the last step that has a validation result.
        longest_stall: the most seconds that training has waited for a checkpoint, over all `fit`s; None before one. It
            waits for the GPU to finish the step, for the ranks, for the checkpoint before it and for the copy. Without
            a thread it also waits for the disk.

    A checkpoint at the end of a step whose validation is still due resumes into that validation.
    """

    def __init__(
        self,
        folder: Path,
        every_n_steps: int,
        keep: int,
        monitor: str = "val_loss",
        every_minutes: float = 0.0,
        keep_every_n_steps: int = 0,
        asynchronous: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.intervals = Intervals(every_n_steps, every_minutes, KeptSteps(keep_every_n_steps))
        self.monitor = monitor
        self.writer = Writer(self.folder, keep, self.intervals.kept, asynchronous)
        self.ledger = Ledger(self.writer)
        self.validated_step: int | None = None
        self.longest_stall: float | None = None
        self._prepared = False  # the writer knows the state that it will get
        self._val_loss: float | None = None  # of `validated_step`
        self._validation_due = False  # in the checkpoint that is being taken

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

    @property
    def best(self) -> Pointer | None:
        """Return the best validation so far."""
        return self.ledger.best

    @property
    def saved_step(self) -> int | None:
        """Return the step of the newest checkpoint that is known to be in the folder."""
        return self.ledger.saved_step

    def save(self, trainer: Trainer) -> bool:
        """Save the present step, unless that was done already. Collective. Returns whether it is saved.

        A checkpoint that is still being written counts as saved. Outside `fit` there is nothing to resume from, so
        nothing is saved. An OSError (a full disk) becomes a warning.
        """
        step = trainer.global_step
        if self.ledger.taken_step == step:
            return True
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or step == 0:
            return False
        before, self.ledger.taken_step = self.ledger.taken_step, step
        self.intervals.begin()
        self._validation_due = self.validated_step != step and loops.is_validation_due(trainer)
        path = self.folder / pointers.folder_name(step)
        with self._stalled(), activity.within(f"in the save of step {step}"):
            try:
                trainer.save_checkpoint(path, weights_only=False, storage_options=partial(self._hand_over, trainer))
            except BaseException:  # settling the step may have asked for a rollback
                self.ledger.taken_step = before
                raise
            self.ledger.share(trainer.strategy.broadcast)
        return self.ledger.taken_step == step

    def save_now(self, trainer: Trainer) -> bool:
        """Save and wait for the disk, at the end of a run. Collective. Returns whether the step is there."""
        if not self.save(trainer):
            return False
        with activity.within(f"in the save of step {trainer.global_step}"):
            self.writer.wait()
            self.ledger.sync(trainer.strategy.broadcast)
        return self.saved_step == trainer.global_step

    # ---- when ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier `fit`. After this, Lightning restores what a checkpoint has of it."""
        if stage == "fit":
            self.ledger.clear()
            self.validated_step = self._val_loss = None
            self._prepared = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tidy the folder, and trust its `best.json` before the checkpoint's state, which may be older.

        Lightning has restored this callback by now. It gets here also if nothing is left to train.
        """
        if trainer.is_global_zero:
            self.writer.begin(self.saved_step, self.best)
            if 0 < trainer.max_steps <= (self.saved_step or 0):
                log.info("already complete: step %d of %d is saved", self.saved_step, trainer.max_steps)
        self.ledger.sync(trainer.strategy.broadcast)
        self.intervals.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save at the intervals, and at the last step."""
        if not self._prepared and trainer.is_global_zero:
            # After the first step the optimizer has its moments, and all CUDA graphs are recorded.
            self.writer.prepare([pl_module.state_dict(), *(optimizer.state_dict() for optimizer in trainer.optimizers)])
            self._prepared = True
        self.writer.check()
        if loops.is_last_step(trainer) or self.intervals.include(trainer.global_step) or self._is_late(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the result of a saved step. If it is the best so far, save the step and let `best.json` name it."""
        if trainer.sanity_checking:
            return
        step = trainer.global_step
        metric = trainer.callback_metrics.get(self.monitor)
        if self.ledger.is_best_missing():
            with self._stalled():
                self.writer.wait()  # the best that it is compared with must be on the disk
        # Without sync_dist every rank has another value, but all ranks must save, or none.
        value = self.ledger.sync(trainer.strategy.broadcast, math.nan if metric is None else float(metric))
        self.validated_step, self._val_loss = step, value
        better = self.ledger.is_better(step, value) and self.ledger.expect_best(
            Pointer(pointers.folder_name(step), step, value), partial(self.save, trainer)
        )
        if self.ledger.taken_step == step and trainer.is_global_zero:
            pointer = Pointer(pointers.folder_name(step), step, finite(value))
            self.ledger.note(pointer, better, partial(_flush_logs, trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end if it is not saved yet, and wait for it. Raises RunError if that fails."""
        step = trainer.global_step
        if step and not any(self.save_now(trainer) for _ in range(2)):
            raise RunError(f"the end of the run (step {step}) could not be saved in {self.folder}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish what is being written. An error of the writer does not hide `exception`."""
        self.ledger.leave()
        if trainer.is_global_zero:
            self.ledger.sync(lambda own: own)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish what is being written: the end of a `fit`, or the note of a validation after it."""
        self.writer.close()

    # ---- what Lightning keeps for it -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the best so far, and whether this step is validated or still must be."""
        best = self.best and {"step": self.best.step, "val_loss": self.best.val_loss}
        return {"best": best, "validated_step": self.validated_step, "validation_due": self._validation_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best and the last validated step."""
        best = state_dict["best"]
        self.ledger.best = best and Pointer(pointers.folder_name(best["step"]), best["step"], best["val_loss"])
        self.validated_step, self._val_loss = state_dict["validated_step"], None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Have Lightning run the validation that was due at the checkpoint, unless it was done later.

        Lightning calls this before it gives `checkpoint` to the loops and to `load_state_dict`.
        """
        state, path = checkpoint["callbacks"].get(self.state_key), Path(str(trainer.ckpt_path))
        if path.parent.resolve() == self.folder.resolve():
            self.ledger.resume(checkpoint["global_step"])
        if state and state["validation_due"]:
            if _is_noted(path):
                state["validated_step"] = checkpoint["global_step"]
            else:
                loops.resume_into_validation(checkpoint["loops"]["fit_loop"])

    # ---- how -----------------------------------------------------------------------------------------------------

    def _is_late(self, trainer: Trainer) -> bool:
        """Return whether rank 0's clock says so. Collective where the clocks are compared, with one small reduction."""
        if not self.intervals.compare_clocks(trainer.global_step):
            return False
        late = trainer.is_global_zero and self.intervals.is_late()
        return trainer.strategy.reduce_boolean_decision(late, all=False)

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.longest_stall = max(self.longest_stall or 0.0, time.perf_counter() - began)

    def _hand_over(self, trainer: Trainer, path: Path, checkpoint: dict[str, Any]) -> None:
        """Give the state to the writer: on rank 0, in `Trainer.save_checkpoint`, where the other ranks wait."""
        step = trainer.global_step
        val_loss = finite(self._val_loss) if self.validated_step == step else None
        self.ledger.save(checkpoint, Pointer(path.name, step, val_loss), partial(_flush_logs, trainer))


def _is_noted(path: Path) -> bool:
    """Return whether the validation of the checkpoint `path` is noted. A changed note does not count."""
    try:
        return pointers.noted(path) is not None
    except (OSError, ValueError) as error:
        log.warning("%s of %s is not used, and the step is validated once more: %s",
                    pointers.VALIDATION, path.name, escaped(str(error)))  # fmt: skip
        return False


def _flush_logs(trainer: Trainer) -> None:
    """Put the logs on the disk. A run that continues from a checkpoint logs only the steps after it."""
    for logger in trainer.loggers:
        getattr(logger, "flush", logger.save)()  # `MetricsFile.save` raises nothing for a full disk
