"""An attempt at a step: its gradients, in the precision whose turn it is and in micro-batches that fit. Plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from gpt2_fp8.config.errors import SharedRefusal
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.engine.out_of_memory import Fitting
from gpt2_fp8.fp8.scaling import Undo
from gpt2_fp8.runtime import collectives, rng
from gpt2_fp8.runtime.moments import Gap, GapClock

log = logging.getLogger(__name__)

IN_BF16 = "micro_batch_size in bf16"


class Attempt(NamedTuple):
    """A step's gradients, which are in the parameters' `.grad`, and what they have changed."""

    ids: Tensor
    loss: Tensor  # float32 on the device: see `step.accumulate`
    amax_outliers: Tensor | None  # of how many FP8 tensors the amax has jumped: see `fp8.scaling`
    random: dict[str, Any]  # the states of torch's generators before it
    undo: Undo  # puts scales and histories back as it found them
    parts: int  # its micro-batches
    gap: Gap | None  # since the step before it


class Attempts:
    """Makes attempts at steps. Collective.

    Tokens per step, their order and the schedule do not depend on the sizes of micro-batches, which only fall.

    Args:
        gradients: computes.
        share: sequences of a step that this rank computes.
        size: sequences of a micro-batch, as the settings ask for.
        memory_of_update: allocates as much memory as the first update will need beside the gradients. It is held while
            the first of these are computed. Otherwise a size could fit only because there is no optimizer state yet. A
            recording's peak then leaves room for it too: memory inside a graph does not count as allocated.

    Attributes:
        training: the size of a micro-batch.
        steps_in_fp8: after so many steps of the run, an FP8 run computes in bf16 (`precision.bf16_last_steps`).
        ahead: whether a step may be attempted before the one before it is settled. What runs within a backward, and
            reads the last step, does not allow it.
        computing, computing_again: whether an attempt is being made; whether a step is being computed again.
        last_in_bf16: how many of the newest settled steps were in bf16 by `steps_in_fp8`.
    """

    def __init__(
        self, gradients: Gradients, share: int, size: int, memory_of_update: Callable[[], list[Tensor]] = list
    ):
        self.plan, self.scaling = gradients.plan, gradients.scaling
        self._gradients, self._share, self._memory_of_update = gradients, share, memory_of_update
        self._asked = size
        self.training = self._fitting(size, "micro_batch_size")
        self._in_bf16: Fitting | None = None
        self.steps_in_fp8 = self.last_in_bf16 = 0
        self.ahead, self.computing, self.computing_again = True, False, False
        self._has_computed = False
        self.gaps = GapClock()

    def _fitting(self, size: int, what: str) -> Fitting:
        return Fitting(size, what, self._share, place=self._gradients.exchange.place)

    def make(self, ids: Tensor, done: int, first: bool = False, gap: Gap | None = None) -> Attempt:
        """Compute the gradients of the step after `done` steps, averaged over the ranks; `first`: of this process.

        `gap`: before an attempt at this step that was taken back. An error, and the Interrupted of a signal, leave no
        gradients, and random numbers and scales as they were; a SharedRefusal leaves all as it is.
        """
        random, gap = rng.capture_torch(), gap or self.gaps.step_begins(ids.device)
        undo: Undo = lambda: None  # noqa: E731
        outliers = None

        def take_back() -> None:
            self._discard(undo)
            rng.restore_torch(random)

        self.computing = True
        try:
            with _after_an_error(take_back):
                if self.plan.fp8 and not self.in_fp8(done):
                    if first or done == self.steps_in_fp8:
                        log.info("step %d and all after it compute in bf16 (precision.bf16_last_steps)", done + 1)
                    loss = self.in_bf16(ids, many=True)
                else:
                    self.find_scales(ids)
                    undo = self.scaling.remember()
                    loss = self.in_own_precision(ids, undo)
                    outliers = self.scaling.count_amax_outliers(self.parts)
        finally:
            self.computing = False
        return Attempt(ids, loss, outliers, random, undo, self.parts, gap)

    def in_own_precision(self, ids: Tensor, undo: Undo) -> Tensor:
        """Compute what `Gradients.of_step` does, averaged over the ranks. Collective. `undo`: see `Attempt`."""
        # The first time here: a size that a checkpoint has proven may have been another number of ranks'.
        beside = list if self._has_computed else self._memory_of_update
        loss = self.training(partial(self._gradients.of_step, ids), partial(self._discard, undo), beside=beside)
        self._has_computed = True
        self._agree()
        return loss

    def in_bf16(self, ids: Tensor, many: bool = False) -> Tensor:
        """Compute what `Gradients.of_step_in_bf16` does, averaged over the ranks. Collective.

        Its layers may keep more memory than those that compute in FP8, so it has its own size. Where that does not fit
        beside the CUDA graphs, their memory is freed first. With `many` it is freed in any case: none in FP8 follows.
        """
        if self._in_bf16 is None:
            self._in_bf16 = self._fitting(self.training.size, IN_BF16)
        if many:
            self._in_bf16.saves = "precision.bf16_last_steps=0"
            self._gradients.release_graphs()

        def discard() -> bool:
            freed = collectives.any_rank(self._gradients.release_graphs())  # a validation may have freed one rank's
            if freed:
                log.warning("no room for a step in bf16 beside training's CUDA graphs: they are recorded again")
            self._gradients.discard()
            return freed

        loss = self._in_bf16(partial(self._gradients.of_step_in_bf16, ids, many=many), discard)
        self._agree()
        return loss

    def _discard(self, undo: Undo) -> None:
        self._gradients.discard()
        undo()

    def _agree(self) -> None:
        self._gradients.exchange.end()
        self.scaling.agree()

    def find_scales(self, ids: Tensor) -> None:
        """Find the scales that delayed scaling needs before the first forward: the checkpoint's, or by calibration.

        Collective. A calibration is the first thing that a run of an FP8 recipe computes, and so the first that may not
        fit. `ids` may belong to a validation, but its size must be one with which training can go on.
        """
        if self.scaling.ready:
            return
        if not self.scaling.take():
            discard = partial(self._discard, self.scaling.remember())
            with _after_an_error(discard):
                self.training(lambda size: self._gradients.calibrate(ids, size), discard, proves_size=False)
            self.scaling.agree()
            self.scaling.ready = True

    def again_in_bf16(self, attempt: Attempt) -> Tensor:
        """Compute a step's gradients again, from scales as they were before it. Returns its loss."""
        attempt.undo()
        self.computing_again = True
        try:
            with _after_an_error(self._gradients.discard):
                return self.in_bf16(attempt.ids)
        finally:
            self.computing_again = False

    def take_back(self, attempt: Attempt) -> None:
        """Leave gradients, scales and random numbers as they were before `attempt`, which must be the newest."""
        self._gradients.exchange.give_up()
        attempt.undo()
        rng.restore_torch(attempt.random)

    @property
    def parts(self) -> int:
        """The number of micro-batches of the last step."""
        return -(-self._share // self.training.size)

    def in_fp8(self, done: int) -> bool:
        """Return whether the step after `done` steps computes in FP8."""
        return self.plan.fp8 and done < self.steps_in_fp8

    def note_settled(self, done: int) -> None:
        """Note in which precision it was the turn of the step after `done` steps, which is settled."""
        self.last_in_bf16 = self.last_in_bf16 + 1 if self.plan.fp8 and not self.in_fp8(done) else 0

    def go_ahead(self, done: int) -> bool:
        """Return whether the step after `done` steps can be attempted before the one before it is settled.

        Not if its micro-batch may not fit. Not if it is the first of the last steps in bf16: it frees the CUDA graphs,
        in whose memory gradients in FP8 lie, so the step before it must be settled.
        """
        first_in_bf16 = self.plan.fp8 and done == self.steps_in_fp8
        return self.ahead and self.training.proven and not first_in_bf16

    def state_dict(self) -> dict[str, int]:
        """Return the micro-batch size that was asked for, and the one that fits; also in bf16, once that is known."""
        in_bf16 = {} if self._in_bf16 is None else {"fits_in_bf16": self._in_bf16.size}
        return {"asked": self._asked, "fits": self.training.size, **in_bf16}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin with the size that fitted before, if the same size was asked for then."""
        if state["asked"] == self._asked and state["fits"] and self._share % state["fits"] == 0:
            self.training.size = min(state["fits"], self.training.size)  # smaller if there is less memory now
            self.training.proven = True
            if (in_bf16 := state.get("fits_in_bf16")) and self._share % in_bf16 == 0:
                self._in_bf16 = self._fitting(in_bf16, IN_BF16)


@contextmanager
def _after_an_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` after any error but a SharedRefusal: then the ranks are apart, and a GPU may wait for another."""
    try:
        yield
    except SharedRefusal:
        raise
    except BaseException:
        undo()
        raise
