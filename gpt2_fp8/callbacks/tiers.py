"""Which checkpoints a run takes, and when. What becomes of them on the disk is `checkpoint/writer.py`'s.

Saving is collective: every rank comes here at the same step, rank 0 copies the state and writes it, and what became of
the checkpoints before goes to all ranks with the save, so that a step without one costs nothing.
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

from gpt2_fp8.checkpoint import loops, pointers
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Outcome, Writer, finite
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.schema import CallbacksConfig

log = logging.getLogger(__name__)

_CLOCK_STEPS = 10  # the ranks agree on the time at every so many steps


class Tiers(Checkpoint):
    """Saves every `every_n_steps` optimizer steps, by the clock, at the end, and at every best validation.

    Args:
        folder: where the checkpoints and `last.json`, `best.json` lie.
        every_n_steps: the interval; 0: not by steps.
        keep: how many of the newest stay (at least one); the best stays besides.
        monitor: the metric whose lowest finite value is the best.
        every_minutes: besides, so long after the last one; 0: not by the clock.
        keep_every_n_steps: one is taken every so many steps, and stays for good; 0: none.
        asynchronous: written by a thread while training goes on; the step waits for a copy in host memory alone.

    Attributes: `best` (a Pointer, or None), `saved_step` (of the newest checkpoint in the folder that this process
    has written or resumed from, as far as this rank knows), `validated_step` (the last step that has a validation
    result) and `longest_stall` (of all `fit`s, the most seconds that training waited for a checkpoint: for the GPU to
    finish the step, the ranks, the checkpoint before it and the copy, or without a thread the disk; None before one).

    A checkpoint taken at the end of a step whose validation is still due resumes into that validation.
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
        self.every_n_steps, self.every_minutes, self.keep_every_n_steps = (
            every_n_steps, every_minutes, keep_every_n_steps,
        )  # fmt: skip
        self.monitor = monitor
        self.writer = Writer(self.folder, keep, keep_every_n_steps, asynchronous)
        self.best: Pointer | None = None
        self.saved_step: int | None = None
        self.validated_step: int | None = None
        self.longest_stall: float | None = None
        self._taken_step: int | None = None  # of the newest checkpoint that is saved or will be
        self._taken_at = time.monotonic()
        self._prepared = False  # the writer knows what it will be given
        self._leaving = False  # by an exception
        self._best_pending = False  # `best` is what the writer was asked for, and not yet known to be on the disk
        self._val_loss: float | None = None  # of `validated_step`
        self._validation_due = False  # in the checkpoint that is being taken

    @classmethod
    def from_config(cls, folder: Path, config: CallbacksConfig) -> Tiers:
        """As `callbacks` of a run's configuration says; `folder` is that of the checkpoints."""
        return cls(
            folder,
            config.checkpoint_every_n_steps,
            config.keep_checkpoints,
            every_minutes=config.checkpoint_every_minutes,
            keep_every_n_steps=config.keep_every_n_steps,
            asynchronous=config.async_checkpoints,
        )

    def save(self, trainer: Trainer) -> bool:
        """Checkpoint the present step, unless that was done already; whether it is. To be called on every rank.

        True of a checkpoint that is still being written, too. Outside `fit` there is nothing to resume from, so nothing
        is saved. An OSError (a full disk) is a warning.
        """
        step = trainer.global_step
        if self._taken_step == step:
            return True
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or step == 0:
            return False
        trainer.lightning_module.finish_step()
        self._taken_step, self._taken_at = step, time.monotonic()
        self._validation_due = self.validated_step != step and loops.is_validation_due(trainer)
        path = self.folder / pointers.folder_name(step)
        with self._stalled():
            trainer.save_checkpoint(path, weights_only=False, storage_options=partial(self._hand_over, trainer))
            self._learn(trainer.strategy.broadcast(self.writer.outcome))
        return self._taken_step == step

    def save_now(self, trainer: Trainer) -> bool:
        """`save`, and wait for the disk; whether the step is there. For the ends of a run, on every rank."""
        return self.save(trainer) and self._is_saved(trainer)

    # ---- when ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier `fit`: Lightning restores what is to be known of it after this."""
        if stage == "fit":
            self._leaving = self._prepared = False
            self.best = self.saved_step = self.validated_step = self._taken_step = self._val_loss = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tidy the folder, and take its `best.json` for the truth: the checkpoint may be older than it.

        Lightning has restored this callback by now, and gets here also when there is nothing left to train.
        """
        if trainer.is_global_zero:
            self.writer.begin(self.saved_step, self.best)
            if 0 < trainer.max_steps <= (self.saved_step or 0):
                log.info("already complete: step %d of %d is saved", self.saved_step, trainer.max_steps)
        self._learn(trainer.strategy.broadcast(self.writer.outcome))
        self._settle_best()
        self._taken_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save at the intervals, and at the last step."""
        if not self._prepared and trainer.is_global_zero:
            # After the first step: the optimizer has its moments, and what is recorded as CUDA graphs has been.
            self.writer.prepare([pl_module.state_dict(), *(optimizer.state_dict() for optimizer in trainer.optimizers)])
            self._prepared = True
        self.writer.check()
        step = trainer.global_step
        by_steps = any(n > 0 and step % n == 0 for n in (self.every_n_steps, self.keep_every_n_steps))
        if by_steps or 0 < trainer.max_steps <= step or self._is_time(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the result beside the step's checkpoint; where it is the best yet, there is one, and `best` points."""
        if trainer.sanity_checking:
            return
        step = trainer.global_step
        metric = trainer.callback_metrics.get(self.monitor)
        if self._best_pending and self.writer.outcome.best != self.best:
            with self._stalled():
                self.writer.wait()  # what the new one is compared with has to be on the disk
        # Without sync_dist every rank has a value of its own, and all of them must save or none.
        found = (math.nan if metric is None else float(metric), self.writer.outcome)
        value, outcome = trainer.strategy.broadcast(found)
        self._learn(outcome)
        self._settle_best()
        self.validated_step, self._val_loss = step, value
        before = self.best
        better = math.isfinite(value) and (
            before is None or before.val_loss is None or value < before.val_loss
            or before.step == step  # after a step back: what was the best here has been written anew
        )  # fmt: skip
        if better:
            self.best = Pointer(pointers.folder_name(step), step, value)
            self._best_pending = self.save(trainer)  # with the new best in its state
            if not self._best_pending:
                self.best, better = before, False
        if self._taken_step == step and trainer.is_global_zero:
            self._note(trainer, better)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end, if it is not saved yet, and wait for it. Raises RunError when it cannot be."""
        step = trainer.global_step
        if step and not any(self.save_now(trainer) for _ in range(2)):
            raise RunError(f"the end of the run (step {step}) could not be saved in {self.folder}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish what is being written, and let nothing that goes wrong with it hide `exception`."""
        self._leaving = True  # another callback may save after this, and nobody would wait for it
        try:
            self.writer.close()
        except Exception as error:
            log.error("a checkpoint was lost: %s: %s", type(error).__name__, error)
        if trainer.is_global_zero:
            self._learn(self.writer.outcome)
            self._settle_best()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish what is being written: the end of a `fit`, or the note of a validation after it."""
        self.writer.close()

    # ---- what Lightning keeps for it -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the best so far, and whether this step is validated or still to be."""
        best = self.best and {"step": self.best.step, "val_loss": self.best.val_loss}
        return {"best": best, "validated_step": self.validated_step, "validation_due": self._validation_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a run where its checkpoint left it."""
        best = state_dict["best"]
        self.best = best and Pointer(pointers.folder_name(best["step"]), best["step"], best["val_loss"])
        self.validated_step, self._val_loss = state_dict["validated_step"], None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Have Lightning run the validation that the checkpoint was taken before, unless it was done after all.

        Lightning calls this before it hands `checkpoint` to the loops and to `load_state_dict`.
        """
        state, path = checkpoint["callbacks"].get(self.state_key), Path(str(trainer.ckpt_path))
        if path.parent.resolve() == self.folder.resolve():
            self.saved_step = self._taken_step = checkpoint["global_step"]
        if state and state["validation_due"]:
            if (path / loops.VALIDATION).exists():
                state["validated_step"] = checkpoint["global_step"]
            else:
                loops.resume_into_validation(checkpoint["loops"]["fit_loop"])

    # ---- how -----------------------------------------------------------------------------------------------------

    def _is_time(self, trainer: Trainer) -> bool:
        """Whether rank 0's clock says so; the same on all ranks, for one small reduction in so many steps."""
        if not self.every_minutes or trainer.global_step % _CLOCK_STEPS:
            return False
        late = time.monotonic() - self._taken_at >= 60 * self.every_minutes
        return trainer.strategy.reduce_boolean_decision(late and trainer.is_global_zero, all=False)

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.longest_stall = max(self.longest_stall or 0.0, time.perf_counter() - began)

    def _hand_over(self, trainer: Trainer, path: Path, checkpoint: dict[str, Any]) -> None:
        """Give the state to the writer: on rank 0, in `Trainer.save_checkpoint`, where the other ranks wait."""
        step = trainer.global_step
        try:
            _flush_logs(trainer)
        except OSError as error:
            self.writer.fail(step, error)
        else:
            self.writer.save(checkpoint, Pointer(path.name, step, self._val_loss_at(step)))
            if self._leaving:
                self.writer.close()

    def _note(self, trainer: Trainer, better: bool) -> None:
        step = trainer.global_step
        try:
            _flush_logs(trainer)
        except OSError as error:
            log.warning("the validation of step %d could not be noted in %s: %s", step, self.folder, error)
        else:
            self.writer.note(Pointer(pointers.folder_name(step), step, self._val_loss_at(step)), better)

    def _is_saved(self, trainer: Trainer) -> bool:
        """Wait for everything; whether the present step is on the disk then. To be called on every rank."""
        self.writer.wait()
        self._learn(trainer.strategy.broadcast(self.writer.outcome))
        self._settle_best()
        return self.saved_step == trainer.global_step

    def _learn(self, outcome: Outcome) -> None:
        """Take rank 0's word for what has been written. A step that could not be is to be taken again when it is due,
        or at the end."""
        self._outcome, self.saved_step = outcome, outcome.saved_step
        if outcome.failed_step is not None and outcome.failed_step == self._taken_step:
            self._taken_step = outcome.saved_step

    def _settle_best(self) -> None:
        """Everything that was asked for is done: the best is the one on the disk."""
        self.best, self._best_pending = self._outcome.best, False

    def _val_loss_at(self, step: int) -> float | None:
        return finite(self._val_loss) if self.validated_step == step else None


def _flush_logs(trainer: Trainer) -> None:
    """A run that continues from a checkpoint logs the steps after it: those before must be on the disk by then."""
    for logger in trainer.loggers:
        logger.save()
