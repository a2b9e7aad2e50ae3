"""What a run knows of its validations, and what its checkpoints say of them.

A checkpoint may be taken between a step and its validation, and then says that this is due. If it is done later, a
note is written into the folder. Without the note, a run that continues from there begins with the validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.ledger import Ledger
from gpt2_fp8.checkpoint.pointers import Pointer


class Validations:
    """Keeps the last validation, and has the `ledger` keep the best one.

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
