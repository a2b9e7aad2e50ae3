"""What every rank knows of a run's checkpoints: which ones were requested, and what has reached the disk.

Only rank 0's writer knows what reached the disk, and it knows late. The result is broadcast with the next collective
operation (a save or a validation), so all ranks decide alike at no extra cost. Until then a requested checkpoint is
assumed to succeed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.pointers import Pointer, folder_name
from gpt2_fp8.checkpoint.writer import Outcome, Writer

log = logging.getLogger(__name__)

Broadcast = Callable[[Any], Any]  # returns rank 0's value on every rank


class Ledger:
    """Asks `writer` for what must be written, on rank 0, and learns what was written, on every rank.

    Attributes:
        taken_step: of the newest checkpoint that is saved or will be, or None.
        saved_step: of the newest checkpoint that is known to be on the disk, or None.
        best: the best validation so far, on the disk or requested; None: none yet.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.clear()

    def clear(self) -> None:
        """Forget everything: another `fit` begins."""
        self.taken_step: int | None = None
        self.saved_step: int | None = None
        self.best: Pointer | None = None
        self._on_disk: Pointer | None = None  # the best on the disk, as far as this rank knows
        self._best_pending = False  # `best` was requested, and is not known to be on the disk
        self._leaving = False

    def resume(self, step: int) -> None:
        """Note that the run continues from the folder's checkpoint of `step`."""
        self.taken_step = self.saved_step = step

    # ---- on rank 0 -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], pointer: Pointer, flush: Callable[[], None]) -> None:
        """Have `checkpoint` written, after `flush`, which puts the logs of the steps before it on the disk.

        An OSError of `flush` counts as one of the checkpoint. Raises what the writer raises.
        """
        try:
            flush()
        except OSError as error:
            self.writer.fail(pointer.step, error)
        else:
            self.writer.save(checkpoint, pointer)
            if self._leaving:
                self.writer.close()

    def note(self, pointer: Pointer, better: bool, flush: Callable[[], None]) -> None:
        """Have the validation of a requested step written down, after `flush`; see `Writer.note`."""
        try:
            flush()
        except OSError as error:
            step, folder = pointer.step, self.writer.folder
            log.warning("the validation of step %d could not be noted in %s: %s", step, folder, error)
        else:
            self.writer.note(pointer, better)

    # ---- on every rank -------------------------------------------------------------------------------------------

    def take(self, step: int, save: Callable[[Path], None], broadcast: Broadcast) -> bool:
        """Have `save` request the checkpoint of `step` for a folder. Collective.

        Returns whether it is saved or will be. Raises what `save` raises; the step then counts as not taken.
        """
        before, self.taken_step = self.taken_step, step
        try:
            save(self.writer.folder / folder_name(step))
        except BaseException:  # settling the step may have asked for a rollback
            self.taken_step = before
            raise
        self.share(broadcast)
        return self.taken_step == step

    def finish(self, step: int, broadcast: Broadcast) -> bool:
        """Wait for the disk, after `take`. Collective. Returns whether the checkpoint of `step` is there."""
        self.writer.wait()
        self.sync(broadcast)
        return self.saved_step == step

    def share(self, broadcast: Broadcast, value: Any = None) -> Any:
        """Learn from rank 0 what has been written. Collective. Returns rank 0's `value`, which is sent along.

        A step that could not be written is saved again when it is due, or at the end.
        """
        value, outcome = broadcast((value, self.writer.outcome))
        self._learn(outcome)
        return value

    def sync(self, broadcast: Broadcast, value: Any = None) -> Any:
        """Do as `share`, when all requests are done: the best is then the one on the disk."""
        value = self.share(broadcast, value)
        self.best, self._best_pending = self._on_disk, False
        return value

    def is_best_missing(self) -> bool:
        """Return whether the requested best is not on the disk yet. Then call `writer.wait` before comparing."""
        return self._best_pending and self.writer.outcome.best != self.best

    def is_better(self, step: int, value: float) -> bool:
        """Return whether the result of a validation at `step` is the best so far."""
        if not math.isfinite(value):
            return False
        # Equal steps: after a rollback the folder of the best was written again.
        return self.best is None or self.best.val_loss is None or value < self.best.val_loss or self.best.step == step

    def expect_best(self, best: Pointer, save: Callable[[], bool]) -> bool:
        """Take `best` as the best while `save` saves its step, which includes it. Returns whether the save succeeded.

        If not, the best is again the one before.
        """
        before, self.best = self.best, best
        self._best_pending = save()
        if not self._best_pending:
            self.best = before
        return self._best_pending

    def leave(self) -> None:
        """Finish what is being written when an exception ends the run. An error of the writer does not hide it.

        Anything saved after this, by code that leaves later, is written at once, since nothing would wait for it.
        """
        self._leaving = True
        try:
            self.writer.close()
        except Exception as error:
            log.error("a checkpoint was lost: %s: %s", type(error).__name__, error)

    def _learn(self, outcome: Outcome) -> None:
        self._on_disk, self.saved_step = outcome.best, outcome.saved_step
        if outcome.failed_step is not None and outcome.failed_step == self.taken_step:
            self.taken_step = outcome.saved_step


class Validations:
    """Keeps the last validation, and has the `ledger` keep the best one.

    A checkpoint may be taken between a step and its validation, and then says that this is due. If it is done later, a
    note is written into the folder. Without the note, a run that continues from there begins with the validation.

    Attributes:
        step: the last step that has a validation result, or None.
        due: whether the step of the newest checkpoint was still to be validated when it was taken; set by the code
            that takes it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.due = False
        self.clear()

    def clear(self) -> None:
        """Forget the last validation: another `fit` begins."""
        self.step: int | None = None
        self._loss: float | None = None  # of `step`, if this process has validated it

    def add(self, step: int, loss: float, save: Callable[[], bool]) -> bool:
        """Take the result of a validation. Returns whether it is the best so far, and `save` has saved its step."""
        self.step, self._loss = step, loss
        best = Pointer(pointers.folder_name(step), step, loss)
        return self._ledger.is_better(step, loss) and self._ledger.expect_best(best, save)

    def pointer(self, step: int) -> Pointer:
        """Return the pointer to the checkpoint of `step`, with its loss if that is known and finite."""
        known = self.step == step and self._loss is not None and math.isfinite(self._loss)
        return Pointer(pointers.folder_name(step), step, self._loss if known else None)

    # ---- in a checkpoint -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the best so far, and whether this step is validated or still must be."""
        best = self._ledger.best and {"step": self._ledger.best.step, "val_loss": self._ledger.best.val_loss}
        return {"best": best, "validated_step": self.step, "validation_due": self.due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best and the last validated step."""
        best = state["best"]
        self._ledger.best = best and Pointer(pointers.folder_name(best["step"]), best["step"], best["val_loss"])
        self.step, self._loss = state["validated_step"], None


def still_due(state: dict[str, Any], path: Path, step: int) -> bool:
    """Return whether the `step` of the checkpoint `path` must still be validated.

    If that was done after the checkpoint was taken, `state`, which is what it holds of validations, is made to say so.
    """
    if not state["validation_due"]:
        return False
    if pointers.noted(path) is None:
        return True
    state["validated_step"] = step
    return False
