"""What every rank knows of a run's checkpoints: which are taken, and what has become of them on the disk.

The latter is known to rank 0's writer alone, and later than it is asked for. It goes to all ranks with what they do
together anyway, a save or a validation, so that they decide alike and a step without a checkpoint costs nothing. Until
then a checkpoint that is taken counts as one that will be there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Outcome, Writer

log = logging.getLogger(__name__)

Broadcast = Callable[[Any], Any]  # a value to rank 0's, on every rank


class Ledger:
    """Asks `writer` for what is to be written, on rank 0, and learns what was, on every rank.

    Attributes:
        taken_step: of the newest checkpoint that is saved or will be, or None; set by who takes one.
        saved_step: of the newest that is known to be on the disk, or None.
        best: the best validation so far: the one on the disk, or the newer one that was asked for; None: none yet.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.clear()

    def clear(self) -> None:
        """Forget everything: another `fit` begins."""
        self.taken_step: int | None = None
        self.saved_step: int | None = None
        self.best: Pointer | None = None
        self._on_disk: Pointer | None = None  # the best there, as far as this rank knows
        self._best_pending = False  # `best` was asked for, and is not known to be on the disk
        self._leaving = False

    def resume(self, step: int) -> None:
        """The run continues from the folder's checkpoint of `step`."""
        self.taken_step = self.saved_step = step

    # ---- on rank 0 -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], pointer: Pointer, flush: Callable[[], None]) -> None:
        """Have `checkpoint` written, after `flush`, which puts the logs of the steps before it on the disk.

        An OSError of `flush` is one of the checkpoint. Raises what the writer raises.
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
        """Have the validation of a step that is taken written down, after `flush`; see `Writer.note`."""
        try:
            flush()
        except OSError as error:
            step, folder = pointer.step, self.writer.folder
            log.warning("the validation of step %d could not be noted in %s: %s", step, folder, error)
        else:
            self.writer.note(pointer, better)

    # ---- on every rank -------------------------------------------------------------------------------------------

    def share(self, broadcast: Broadcast, value: Any = None) -> Any:
        """Take rank 0's word for what has been written; returns its `value`, which travels along.

        A step that could not be is to be taken again when it is due, or at the end.
        """
        value, outcome = broadcast((value, self.writer.outcome))
        self._learn(outcome)
        return value

    def sync(self, broadcast: Broadcast, value: Any = None) -> Any:
        """`share`, where all that was asked for is done: the best is the one on the disk."""
        value = self.share(broadcast, value)
        self.best, self._best_pending = self._on_disk, False
        return value

    def is_best_missing(self) -> bool:
        """Whether the best was asked for and is not on the disk yet: `writer.wait` before anything is compared."""
        return self._best_pending and self.writer.outcome.best != self.best

    def expect_best(self, best: Pointer, save: Callable[[], bool]) -> bool:
        """Have `best` for the best while `save` saves its step, with it in the state; whether that will be there.

        If not, the best is the one before still.
        """
        before, self.best = self.best, best
        self._best_pending = save()
        if not self._best_pending:
            self.best = before
        return self._best_pending

    def leave(self) -> None:
        """By an exception: finish what is being written, and let nothing that goes wrong with it hide the exception.

        What is saved after this, by somebody who leaves later, is written at once: nobody would wait for it.
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
