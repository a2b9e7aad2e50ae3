"""Which checkpoints a run takes, and when. `checkpoint/ledger.py` and the writer do the rest.

Saving is collective: every rank comes here at the same step, and rank 0 copies the state and writes it.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from gpt2_fp8.checkpoint.intervals import Intervals, KeptSteps, Stall
from gpt2_fp8.checkpoint.ledger import Ledger, Validations, still_due
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Writer
from gpt2_fp8.compat import lightning_loops as loops
from gpt2_fp8.compat.lightning_logging import flush
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.schema import CallbacksConfig
from gpt2_fp8.runtime import collectives

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
        ledger: what this rank knows of the checkpoints.
        validations: what is known of the run's validations.
        stall: how long training has waited for a checkpoint.

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
        self.validations = Validations(self.ledger)
        self.stall = Stall()
        self._prepared = False  # the writer knows the state that it will get

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
        """Return the best validation so far, or None."""
        return self.ledger.best

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
        self.intervals.begin()
        self.validations.due = self.validations.step != step and loops.is_validation_due(trainer)
        save = partial(trainer.save_checkpoint, weights_only=False, storage_options=partial(self._hand_over, trainer))
        with self.stall.measured():
            return self.ledger.take(step, save, trainer.strategy.broadcast)

    def save_now(self, trainer: Trainer) -> bool:
        """Save and wait for the disk, at the end of a run. Collective. Returns whether the step is there."""
        return self.save(trainer) and self.ledger.finish(trainer.global_step, trainer.strategy.broadcast)

    def _hand_over(self, trainer: Trainer, path: Path, checkpoint: dict[str, Any]) -> None:
        """Give the state to the writer: on rank 0, in `Trainer.save_checkpoint`, where the other ranks wait.

        The logs are flushed first: a run that continues from the checkpoint logs only the steps after it.
        """
        self.ledger.save(checkpoint, self.validations.pointer(trainer.global_step), partial(flush, trainer))

    # ---- when ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier `fit`. After this, Lightning restores what a checkpoint has of it."""
        if stage == "fit":
            self.ledger.clear()
            self.validations.clear()
            self._prepared = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tidy the folder, and trust its `best.json` before the checkpoint's state, which may be older.

        Lightning has restored this callback by now. It gets here also if nothing is left to train.
        """
        if trainer.is_global_zero:
            self.writer.begin(self.ledger.saved_step, self.best)
            if 0 < trainer.max_steps <= (self.ledger.saved_step or 0):
                log.info("already complete: step %d of %d is saved", self.ledger.saved_step, trainer.max_steps)
        self.ledger.sync(trainer.strategy.broadcast)
        self.intervals.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save at the intervals, and at the last step."""
        if not self._prepared:
            self._prepare(trainer, pl_module)
        self.writer.check()
        if loops.is_last_step(trainer) or self.intervals.is_due(trainer.global_step, partial(_agreed, trainer)):
            self.save(trainer)

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the writer what it will get: after the first step there are moments, and CUDA graphs are recorded."""
        state = pl_module.state_dict()  # on all ranks: it settles the step
        if trainer.is_global_zero:
            self.writer.prepare([state, *(optimizer.state_dict() for optimizer in trainer.optimizers)])
        self._prepared = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the result of a saved step. If it is the best so far, save the step and let `best.json` name it."""
        if trainer.sanity_checking:
            return
        step, metric = trainer.global_step, trainer.callback_metrics.get(self.monitor)
        if self.ledger.is_best_missing():
            with self.stall.measured():
                self.writer.wait()  # the best that it is compared with must be on the disk
        # Without sync_dist every rank has another value, but all ranks must save, or none.
        value = self.ledger.sync(trainer.strategy.broadcast, math.nan if metric is None else float(metric))
        better = self.validations.add(step, value, partial(self.save, trainer))
        if self.ledger.taken_step == step and trainer.is_global_zero:
            self.ledger.note(self.validations.pointer(step), better, partial(flush, trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end if it is not saved yet, and wait for it. Raises RunError if that fails."""
        if trainer.global_step and not any(self.save_now(trainer) for _ in range(2)):
            raise RunError(f"the end of the run (step {trainer.global_step}) could not be saved in {self.folder}")

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
        """Return what is known of validations."""
        return self.validations.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was known of validations."""
        self.validations.load_state_dict(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Have Lightning run the validation that was due at the checkpoint, unless it was done later.

        Lightning calls this before it gives `checkpoint` to the loops and to `load_state_dict`.
        """
        state, path = checkpoint["callbacks"].get(self.state_key), Path(str(trainer.ckpt_path))
        if path.parent.resolve() == self.folder.resolve():
            self.ledger.resume(checkpoint["global_step"])
        if state and still_due(state, path, checkpoint["global_step"]):
            loops.resume_into_validation(checkpoint["loops"]["fit_loop"])


def _agreed(trainer: Trainer, own: bool) -> bool:
    """Return rank 0's `own` on every rank. Collective. The strategy's own way would wait for the GPU."""
    return collectives.any_rank(own and trainer.is_global_zero)
