"""Which checkpoints a run keeps: the newest few, the best by validation loss, and two pointers to them.

A folder becomes durable, then the pointer moves, then what is superseded goes: at no moment is there nothing to resume
from. A disk that is full costs the checkpoints that do not fit, not the run.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from gpt2_fp8.checkpoint import durable, files, loops, pointers
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.config.errors import RunError

log = logging.getLogger(__name__)


class Tiers(Checkpoint):
    """Saves every `every_n_steps` optimizer steps (0: at the end alone), at the end, and at every best validation.

    Args:
        folder: where the checkpoints and `last.json`, `best.json` lie.
        every_n_steps: the interval; 0 leaves the one at the end.
        keep: how many of the newest stay (at least one); the best stays besides.
        monitor: the metric whose lowest finite value is the best.

    Attributes: `best` (a Pointer, or None), `saved_step` (of the newest checkpoint in the folder that this process
    wrote or resumed from) and `validated_step` (the last step that has a validation result).

    A checkpoint taken at the end of a step whose validation is still due resumes into that validation.
    """

    def __init__(self, folder: Path, every_n_steps: int, keep: int, monitor: str = "val_loss") -> None:
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = max(1, keep)
        self.monitor = monitor
        self.best: Pointer | None = None
        self.saved_step: int | None = None
        self.validated_step: int | None = None
        self._val_loss: float | None = None  # of `validated_step`
        self._validation_due = False  # in the checkpoint that is being written
        self._warned = False

    def save(self, trainer: Trainer) -> bool:
        """Checkpoint the present step, unless it is saved already; whether it is now. To be called on every rank.

        Outside `fit` there is nothing to resume from, so nothing is saved. An OSError (a full disk) is a warning.
        """
        step = trainer.global_step
        if self.saved_step == step:
            return True
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or step == 0:
            return False
        self._validation_due = self._is_validation_due(trainer)
        problem = self._write(trainer, self.folder / pointers.folder_name(step))
        if problem is None:
            self.saved_step, self._warned = step, False
        elif not self._warned:
            log.warning("step %d could not be saved, training goes on: %s", step, problem)
            self._warned = True
        return problem is None

    # ---- when ----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tidy the folder, and take its `best.json` for the truth: the checkpoint may be older than it.

        Lightning has restored this callback by now, and gets here also when there is nothing left to train.
        """
        best = self.best
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.sweep(self.folder)
            best = self._reconciled_best()
        self.best = trainer.strategy.broadcast(best)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save at the interval, and at the last step."""
        step = trainer.global_step
        at_interval = self.every_n_steps > 0 and step % self.every_n_steps == 0
        if at_interval or 0 < trainer.max_steps <= step:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the result beside the step's checkpoint; where it is the best yet, there is one, and `best` points."""
        if trainer.sanity_checking:
            return
        step = trainer.global_step
        metric = trainer.callback_metrics.get(self.monitor)
        # Without sync_dist every rank has a value of its own, and all of them must save or none.
        value = trainer.strategy.broadcast(math.nan if metric is None else float(metric))
        self.validated_step, self._val_loss = step, value
        before = self.best
        better = math.isfinite(value) and (before is None or before.val_loss is None or value < before.val_loss)
        if better:
            self.best = Pointer(pointers.folder_name(step), step, value)
            if not self.save(trainer):  # with the new best in its state
                self.best, better = before, False
        if self.saved_step == step and trainer.is_global_zero:
            self._note_validation(trainer, better)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end, if it is not saved yet. Raises RunError when it cannot be."""
        if trainer.global_step and not self.save(trainer):
            raise RunError(f"the end of the run (step {trainer.global_step}) could not be saved in {self.folder}")

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
            self.saved_step = checkpoint["global_step"]
        if state and state["validation_due"]:
            if (path / loops.VALIDATION).exists():
                state["validated_step"] = checkpoint["global_step"]
            else:
                loops.resume_into_validation(checkpoint["loops"]["fit_loop"])

    # ---- how -----------------------------------------------------------------------------------------------------

    def _is_validation_due(self, trainer: Trainer) -> bool:
        if self.validated_step == trainer.global_step:
            return False
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        return fetcher is not None and loop._should_check_val_fx(fetcher)  # also true in the midst of it

    def _write(self, trainer: Trainer, path: Path) -> str | None:
        """Write the folder and move `last`; what went wrong on the rank that writes, told to all of them."""
        problem = None
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            problem = str(error)
            trainer.strategy.barrier()  # the one at the end of save_checkpoint, where the other ranks wait
        if problem is None and trainer.is_global_zero:
            step = trainer.global_step
            try:
                _flush_logs(trainer)
                pointers.write(self.folder, "last", Pointer(path.name, step, self._val_loss_at(step)))
                self._prune(step)
            except OSError as error:
                problem = str(error)
        return trainer.strategy.broadcast(problem)

    def _note_validation(self, trainer: Trainer, better: bool) -> None:
        step = trainer.global_step
        name, value = pointers.folder_name(step), self._val_loss_at(step)
        try:
            _flush_logs(trainer)
            if better:
                pointers.write(self.folder, "best", Pointer(name, step, value))
            pointers.write(self.folder, "last", Pointer(name, step, value))
            durable.write_json(self.folder / name / loops.VALIDATION, {"step": step, self.monitor: value})
            self._prune(step)
        except OSError as error:
            log.warning("the validation of step %d could not be noted in %s: %s", step, self.folder, error)

    def _val_loss_at(self, step: int) -> float | None:
        value = self._val_loss
        return value if self.validated_step == step and value is not None and math.isfinite(value) else None

    def _prune(self, step: int) -> None:
        """Delete what newer checkpoints supersede. Later steps than this one (of a branch left behind) stay."""
        found = {s: path for s, path in pointers.steps(self.folder).items() if s <= step}
        kept = set(sorted(found)[-self.keep :]) | ({self.best.step} if self.best else set())
        for superseded in found.keys() - kept:
            files.remove(found[superseded])

    def _reconciled_best(self) -> Pointer | None:
        on_disk = pointers.read(self.folder, "best")
        if on_disk and files.is_checkpoint(self.folder / on_disk.checkpoint):
            return on_disk
        if self.best and files.is_checkpoint(self.folder / self.best.checkpoint):
            pointers.write(self.folder, "best", self.best)
            return self.best
        return None  # this folder's run starts its own: the state may be another run's


def _flush_logs(trainer: Trainer) -> None:
    """A run that continues from a checkpoint logs the steps after it: those before must be on the disk by then."""
    for logger in trainer.loggers:
        logger.save()
