"""An attempt at a step: its gradients, in the precision whose turn it is, and how they are taken back. Plain torch."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from torch import Tensor

from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.engine.micro_batching import MicroBatching
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.fp8.scaling import Undo
from gpt2_fp8.runtime import rng
from gpt2_fp8.runtime.moments import Gap, GapClock

log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """A step's gradients, which are in the parameters' `.grad`, and what they have changed."""

    ids: Tensor
    loss: Tensor  # float32 on the device: see `step.accumulate`
    absurd: Tensor | None  # of how many FP8 tensors the amax has jumped: see `fp8.magnitudes`
    random: dict[str, Any]  # the states of torch's generators before it
    undo: Undo  # puts scales and histories back as it found them
    parts: int  # its micro-batches
    gap: Gap | None  # since the step before it


class Attempts:
    """Makes attempts at steps. Collective.

    Args:
        plan: what computes.
        gradients, batching: compute.

    Attributes:
        steps_in_fp8: after so many steps of the run, an FP8 run computes in bf16 (`precision.bf16_last_steps`).
        ahead: whether a step may be attempted before the one before it is settled. What runs within a backward, and
            reads the last step, does not allow it.
        computing: whether an attempt is being made.
        computing_again: whether a step is being computed again.
        last_in_bf16: how many of the newest settled steps were in bf16 by `steps_in_fp8`.
        gaps: tells the gap before an attempt.
    """

    def __init__(self, plan: Plan, gradients: Gradients, batching: MicroBatching):
        self.plan, self.scaling = plan, gradients.scaling
        self._gradients, self._batching = gradients, batching
        self.steps_in_fp8 = self.last_in_bf16 = 0
        self.ahead, self.computing, self.computing_again = True, False, False
        self.gaps = GapClock()

    def __call__(self, ids: Tensor, done: int, first: bool) -> Attempt:
        """Compute the gradients of the step after `done` steps; `first`: of this process.

        An error, and the Interrupted of a signal, leave no gradients, and random numbers and scales as they were.
        """
        random, gap = rng.capture_torch(), self.gaps.step_begins(ids.device)
        self.computing = True
        try:
            loss, absurd = self._computed(ids, done, first)
        except BaseException:
            self._gradients.discard()
            rng.restore_torch(random)
            raise
        finally:
            self.computing = False
        return Attempt(ids, loss, absurd, random, self._gradients.take_undo(), self._batching.parts(), gap)

    def _computed(self, ids: Tensor, done: int, first: bool) -> tuple[Tensor, Tensor | None]:
        if self.plan.fp8 and not self.in_fp8(done):
            if first or done == self.steps_in_fp8:
                log.info("step %d and all after it compute in bf16 (precision.bf16_last_steps)", done + 1)
            return self._batching.gradients_in_bf16(ids, many=True), None
        self.find_scales(ids)
        return self._batching.gradients(ids), self.scaling.absurd(self._batching.parts())

    def in_fp8(self, done: int) -> bool:
        """Return whether the step after `done` steps computes in FP8."""
        return self.plan.fp8 and done < self.steps_in_fp8

    def settled(self, done: int) -> None:
        """Note in which precision it was the turn of the step after `done` steps, which is settled."""
        self.last_in_bf16 = self.last_in_bf16 + 1 if self.plan.fp8 and not self.in_fp8(done) else 0

    def go_ahead(self, done: int) -> bool:
        """Return whether the step after `done` steps can be attempted before the one before it is settled.

        Not if its micro-batch may not fit. Not if it is the first of the last steps in bf16: it frees the CUDA graphs,
        in whose memory gradients in FP8 lie, so the step before it must be settled.
        """
        first_in_bf16 = self.plan.fp8 and done == self.steps_in_fp8
        return self.ahead and self._batching.training.proven and not first_in_bf16

    def find_scales(self, ids: Tensor) -> None:
        """Find the scales that delayed scaling needs before the first forward: the checkpoint's, or by calibration."""
        if self.scaling.ready:
            return
        if not self.scaling.take():
            self._batching.calibrate(ids)
            self.scaling.ready = True

    def take_back(self, attempt: Attempt) -> None:
        """Leave gradients, scales and random numbers as they were before `attempt`, which must be the newest."""
        self._gradients.model.zero_grad(set_to_none=True)
        attempt.undo()
        rng.restore_torch(attempt.random)

    def again_in_bf16(self, attempt: Attempt) -> Tensor:
        """Compute a step's gradients again, from scales as they were before it. Returns its loss."""
        attempt.undo()
        self.computing_again = True
        try:
            return self._batching.gradients_in_bf16(attempt.ids)
        finally:
            self.computing_again = False
