"""When a run saves, and what every rank knows of its checkpoints and validations.

Only rank 0's writer knows what reached the disk. The next save or validation broadcasts it, so all ranks decide alike.
Until then a requested checkpoint is assumed to succeed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.pointers import Pointer, folder_name
from gpt2_fp8.checkpoint.writer import Writer

Broadcast = Callable[[Any], Any]  # returns rank 0's value on every rank

_CLOCK_STEPS = 10  # the ranks compare the time at every multiple of this step


class Intervals:
    """Says at which steps a checkpoint is due, and which are kept for good. An interval of 0 is none.

    Checkpoints at multiples of `keep_every_n_steps`, and of the steps `epoch_ends`, are permanent.
    """

    def __init__(self, every_n_steps: int, every_minutes: float = 0.0, keep_every_n_steps: int = 0) -> None:
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self.keep_every_n_steps = keep_every_n_steps
        self.epoch_ends: frozenset[int] = frozenset()
        self._began = time.monotonic()

    def restart_clock(self) -> None:
        """Count the minutes from now on."""
        self._began = time.monotonic()

    def is_permanent(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is never superseded."""
        return step in self.epoch_ends or (self.keep_every_n_steps > 0 and step % self.keep_every_n_steps == 0)

    def is_due(self, step: int, agree: Callable[[bool], bool]) -> bool:
        """Return whether `step` is to be saved.

        `agree` gets whether the minutes are over by this process's clock, and returns rank 0's answer. Collective.
        """
        if self.is_permanent(step) or (self.every_n_steps > 0 and step % self.every_n_steps == 0):
            return True
        if not self.every_minutes or step % _CLOCK_STEPS:
            return False
        return agree(time.monotonic() - self._began >= 60 * self.every_minutes)


class CheckpointTracker:
    """Knows, alike on every rank, which checkpoints were requested and saved, and the last and the best validation.

    Attributes:
        requested_step: of the newest checkpoint that is saved or will be, or None.
        saved_step: of the newest checkpoint that is known to be on the disk, or None.
        best: the best validation so far, on the disk or requested; None: none yet.
        validated_step, val_loss: the last step that has a validation result, and its loss, or None.
        validation_due: whether the step of the newest checkpoint was still to be validated when it was taken. A later
            validation leaves a note in the checkpoint's folder; a run that continues without it begins with it.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.validation_due = False
        self.reset()

    def reset(self) -> None:
        """Forget everything: another `fit` begins."""
        self.requested_step: int | None = None
        self.saved_step: int | None = None
        self.best: Pointer | None = None
        self.validated_step: int | None = None
        self.val_loss: float | None = None
        self._best_on_disk: Pointer | None = None  # as far as this rank knows
        self._best_pending = False  # `best` was requested, and is not known to be on the disk

    def resume(self, step: int) -> None:
        """Note that the run continues from the folder's checkpoint of `step`."""
        self.requested_step = self.saved_step = step

    def request(self, step: int, save: Callable[[Path], None], broadcast: Broadcast) -> bool:
        """Have `save` request the checkpoint of `step`; return whether it is saved or will be. Collective."""
        before, self.requested_step = self.requested_step, step
        try:
            save(self.writer.folder / folder_name(step))
        except BaseException:  # settling the step may have asked for a rollback
            self.requested_step = before
            raise
        self.share(broadcast)
        return self.requested_step == step

    def share(self, broadcast: Broadcast, value: Any = None) -> Any:
        """Learn from rank 0 what has been written. Collective. Returns rank 0's `value`, which is sent along.

        A step that could not be written is saved again when it is due, or at the end.
        """
        value, outcome = broadcast((value, self.writer.outcome))
        self._best_on_disk, self.saved_step = outcome.best, outcome.saved_step
        if outcome.failed_step is not None and outcome.failed_step == self.requested_step:
            self.requested_step = outcome.saved_step
        return value

    def sync(self, broadcast: Broadcast, value: Any = None) -> Any:
        """Do as `share`, when all requests are done: the best is then the one on the disk."""
        value = self.share(broadcast, value)
        self.best, self._best_pending = self._best_on_disk, False
        return value

    def is_best_pending(self) -> bool:
        """Return whether the requested best is not on the disk yet. Then call `writer.wait` before comparing."""
        return self._best_pending and self.writer.outcome.best != self.best

    def add_validation(self, step: int, loss: float, save: Callable[[], bool]) -> bool:
        """Record the result of a validation; the best so far has `save` save its step. Returns whether it has."""
        self.validated_step, self.val_loss = step, loss
        before = self.best
        # Equal steps: after a rollback the folder of the best was written again.
        is_best = before is None or before.val_loss is None or loss < before.val_loss or before.step == step
        if not (math.isfinite(loss) and is_best):
            return False
        self.best = self.pointer(step)  # while `save` saves it in the checkpoint
        self._best_pending = save()
        if not self._best_pending:
            self.best = before
        return self._best_pending

    def pointer(self, step: int) -> Pointer:
        """Return the pointer to the checkpoint of `step`, with its loss if that is known and finite."""
        known = self.validated_step == step and self.val_loss is not None and math.isfinite(self.val_loss)
        return Pointer(folder_name(step), step, self.val_loss if known else None)

    # ---- in a checkpoint -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the best so far, and whether this step is validated or still must be."""
        best = self.best and {"step": self.best.step, "val_loss": self.best.val_loss}
        step = {"validated_step": self.validated_step, "val_loss": self.val_loss}
        return {"best": best, **step, "validation_due": self.validation_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best and the last validated step."""
        best = state["best"]
        self.best = best and Pointer(folder_name(best["step"]), best["step"], best["val_loss"])
        self.validated_step, self.val_loss = state["validated_step"], state.get("val_loss")  # not in older ones


def is_validation_due(state: dict[str, Any], path: Path, step: int) -> bool:
    """Return whether the `step` of the checkpoint `path` must still be validated; `state` is what it holds of that.

    If it was done after the checkpoint was taken, `state` is made to say so.
    """
    if not state["validation_due"]:
        return False
    if (note := pointers.read_note(path)) is None:
        return True
    state |= {"validated_step": step, "val_loss": note.val_loss}
    return False
