"""What is written into a run's checkpoint folder, in one order: a checkpoint, its pointer, then the deletions.

A folder becomes durable, then the pointer moves, then superseded folders are deleted. So a run can be resumed at any
moment. That holds for writing in the step and in a thread, because both run the same jobs, one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.snapshot import Snapshots
from gpt2_fp8.config.errors import UserError

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What has become of the jobs so far."""

    saved_step: int | None = None  # the newest checkpoint that is durable and that `last` names
    failed_step: int | None = None  # the newest checkpoint, if it could not be written
    best: Pointer | None = None  # what `best.json` says


class Writer:
    """Writes the checkpoints of one run, in the one process that writes them.

    Args:
        folder: holds the checkpoints and their pointers.
        keep: how many of the newest are kept (at least one), in addition to the best.
        is_permanent: says whether a step's checkpoint is kept for good; None: none is.
        asynchronous: write in a thread, from a copy in host memory, which waits for the checkpoint before it.

    A disk that does not take a checkpoint costs only that checkpoint: a warning and `outcome.failed_step`. A process
    that leaves without `close` may lose the newest checkpoint, but no older one.
    """

    def __init__(
        self, folder: Path, keep: int, is_permanent: Callable[[int], bool] | None = None, asynchronous: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)
        self.asynchronous = asynchronous
        self.outcome = Outcome()
        self.written: set[int] = set()  # the steps that this object has written, deleted or not
        self._is_permanent = is_permanent or (lambda step: False)
        self._snapshots = Snapshots()
        self._has_begun = False  # the copy of a checkpoint
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._said_slow = False
        self._is_failing = False

    def begin(self, saved_step: int | None, best: Pointer | None) -> None:
        """Make the folder, tidy it, and trust its `best.json` before the `best` of a checkpoint, which may be older.

        `saved_step`: of the folder's checkpoint from which the run continues. Raises UserError if it cannot be written.
        """
        self.wait()
        self._is_failing = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.sweep(self.folder)
            self.outcome = Outcome(saved_step, None, self._reconcile_best(best))
        except OSError as error:
            raise UserError.of(f"{self.folder} cannot be written: {error.strerror or error}") from None

    def _reconcile_best(self, best: Pointer | None) -> Pointer | None:
        """Return what `best.json` says, or else, writing it again, the best of `best` and the checkpoints' notes."""
        named, known = pointers.read(self.folder, "best"), [best]
        if named and files.is_checkpoint(self.folder / named.checkpoint):
            return named
        if (self.folder / "best.json").exists():  # damaged
            known += map(pointers.read_note, pointers.steps(self.folder).values())
        validated = [one for one in known if one is not None and one.val_loss is not None]
        found = min(validated, key=lambda one: one.val_loss or 0.0, default=None)
        if found is None or not files.is_checkpoint(self.folder / found.checkpoint):
            return None  # this folder's run has no best yet: the state may be another run's
        pointers.write(self.folder, "best", found)
        return found

    def prepare(self, state: Any) -> None:
        """Have host memory locked for copies of a state like this one, as `Pinned.reserve` does; returns at once."""
        if self.asynchronous:
            self._snapshots.prepare(state)

    def begin_copy(self) -> None:
        """Wait for the checkpoint before, and have `copy` make copies of the next one's tensors."""
        self.wait()
        self._snapshots.begin()
        self._has_begun = True

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of a checkpoint that is to be saved: see `Snapshots.copy`."""
        return self._snapshots.copy(tensor)

    def save(self, checkpoint: dict[str, Any], pointer: Pointer) -> None:
        """Write `checkpoint`, which may change once this returns, as `pointer` says, and let `last` name it."""
        has_begun, self._has_begun = self._has_begun, False
        if self.asynchronous or has_begun:
            if not self._said_slow and any(not job.done() for job in self._jobs):
                log.warning("step %d waits for the checkpoint before it: the disk is slower than the interval",
                            pointer.step)  # fmt: skip
                self._said_slow = True
            self.wait()
            checkpoint = self._snapshots.take(checkpoint, has_begun)
        self.outcome = self.outcome._replace(failed_step=None)  # this may be a retry of the step that failed
        self._submit(self._save, checkpoint, pointer)

    def note(self, pointer: Pointer, better: bool) -> None:
        """Write the validation of a saved step, and let `best` name it if it is `better`.

        `pointer.val_loss` is None for a loss that is not finite. Nothing happens if the step could not be saved.
        """
        self._submit(self._note, pointer, better)

    def fail(self, step: int, error: Exception) -> None:
        """Record a checkpoint that could not be written. The first of several in a row logs a warning."""
        self.outcome = self.outcome._replace(failed_step=step)
        if not self._is_failing:
            log.warning("step %d could not be saved, training goes on: %s", step, error)
        self._is_failing = True

    def check(self) -> None:
        """Raise what a finished job raised, without waiting. A full disk raises nothing."""
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def wait(self) -> None:
        """Return when all jobs are done. Raises what a job raised; the others stay queued."""
        while self._jobs:
            self._jobs.pop(0).result()

    def close(self) -> None:
        """Finish everything, end the thread, and release locked memory. Raises what a job raised."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._snapshots.close()

    def _submit(self, job: Callable[..., None], *arguments: Any) -> None:
        if not self.asynchronous:
            job(*arguments)
            return
        self.check()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._jobs.append(self._thread.submit(job, *arguments))

    # ---- the jobs ------------------------------------------------------------------------------------------------

    def _save(self, checkpoint: dict[str, Any], pointer: Pointer) -> None:
        try:
            self._give_up_best(pointer.step)
            files.write(self.folder / pointer.checkpoint, checkpoint)
            self.written.add(pointer.step)
            pointers.write(self.folder, "last", pointer)
        except OSError as error:
            self.fail(pointer.step, error)
            return
        self._is_failing = False
        self.outcome = self.outcome._replace(saved_step=pointer.step, failed_step=None)
        self._prune(pointer.step)

    def _give_up_best(self, step: int) -> None:
        """Give the best up if its step is written again after a rollback: the new weights never had its loss."""
        if self.outcome.best is not None and self.outcome.best.step == step:
            log.warning("step %d, the best so far, is reached once more and written again", step)
            pointers.remove(self.folder, "best")
            self.outcome = self.outcome._replace(best=None)

    def _note(self, pointer: Pointer, better: bool) -> None:
        step = pointer.step
        if self.outcome.saved_step != step:
            return
        try:
            if better:
                pointers.write(self.folder, "best", pointer)
                self.outcome = self.outcome._replace(best=pointer)
            pointers.write(self.folder, "last", pointer)
            pointers.write_note(self.folder, pointer)
        except OSError as error:
            log.warning("the validation of step %d could not be noted in %s: %s", step, self.folder, error)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Delete what newer checkpoints supersede. Later steps, of a branch left behind, stay."""
        found = {s: path for s, path in pointers.steps(self.folder).items() if s <= step}
        kept = set(sorted(found)[-self.keep :]) | set(filter(self._is_permanent, found))
        if self.outcome.best is not None:
            kept.add(self.outcome.best.step)
        for superseded in found.keys() - kept:
            try:
                files.remove(found[superseded])
            except OSError as error:
                log.warning("%s is superseded and could not be deleted: %s", found[superseded], error)
