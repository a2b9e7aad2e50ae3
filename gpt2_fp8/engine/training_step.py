"""One optimizer step and its owner, which holds everything that lives from one step to the next. Plain torch.

The LightningModule trains through it and the benchmark times it, so what is measured is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt2_fp8.config.run_length import last_step, steps_in_fp8
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.attempts import Attempt, Attempts
from gpt2_fp8.engine.average import WeightAverage
from gpt2_fp8.engine.evaluation import Evaluation, in_mode
from gpt2_fp8.engine.exchange import Exchange, NoSync
from gpt2_fp8.engine.gradients import Backward, Gradients
from gpt2_fp8.engine.optim import build_optimizer, build_schedule, state_like
from gpt2_fp8.engine.sharded import Sharded
from gpt2_fp8.engine.step import StepResult, Verdict, update
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.fp8.scaling import Context
from gpt2_fp8.model.gpt2 import initialise
from gpt2_fp8.model.loss import loss_parts
from gpt2_fp8.runtime import collectives, rng
from gpt2_fp8.runtime.moments import Gap
from gpt2_fp8.runtime.sharding import Sharding, fill
from gpt2_fp8.runtime.signals import Interrupted

COMPUTES_MEANWHILE = ["cuda"]  # devices that compute while the host goes on


class _Unsettled(NamedTuple):
    """A step whose update is on its way; the host does not know yet whether it was made."""

    attempt: Attempt
    result: StepResult
    done: Callable[[], object]


class TrainingStep:
    """Computes one optimizer step a call: micro-batches, calibration, the FP8 attempt, clipping, update, verdict.

    A step is *settled* once the host knows whether its update was made. Settling immediately would make the host wait
    for the GPU. So a step settles late: when the next one comes, or when anything here is asked for. Only a caller that
    reads the weights themselves or the time calls `settle` first.

    The next step's gradients are computed *ahead*: before the host waits for the verdict. A verdict that changes
    weights or scales takes the attempt back, and it is made again: the numbers are the same.

    Args:
        config: the run's; its micro-batch is a number.
        plan: what computes.
        vocab_size: the tokenizer's.
        backward, forward_context: see `Gradients`.
        no_sync: see `Exchange`.
        sharding: how the model is divided among ranks; None: each has all of it.

    Attributes:
        model: built on torch's default device. Build inside `with torch.device("cuda")` for a GPU, as Lightning does.
        share: sequences of a step that this rank computes.
        attempts: computes the gradients of a step.
        average: of the weights, over the steps whose update was made.
        evaluation: computes losses and forwards between two steps, with the average if it exists; it settles the last
            one.
        on_settled: functions called with each settled step's result, in order. Their errors come out of the call
            that settled the step. One that asks for more here has the next gradients computed again.
        on_given_up: called if a signal ended the second attempt at a settled step: the step is not counted.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        vocab_size: int,
        *,
        backward: Backward = Tensor.backward,
        no_sync: NoSync = nullcontext,
        forward_context: Context | None = None,
        sharding: Sharding | None = None,
    ):
        self.config, self.plan = config, plan
        self.model = plan.backend.build(vocab_size, sharding)
        self.scaling = plan.backend.scaling(self.model)
        reduced = torch.bfloat16 if config.precision.reduce == "bf16" else torch.float32
        self.exchange = Exchange(self.model.parameters(), no_sync, reduced)
        if sharding is not None:
            self.exchange = Sharded(self.model, sharding.mesh)
        gradients = Gradients(plan, self.model, self.scaling, backward, self.exchange, forward_context)
        self.share = config.global_batch_size // collectives.rank_and_world()[1]
        self.attempts = Attempts(gradients, self.share, config.micro_batch, self._memory_of_update)
        self.average = WeightAverage(self.model, config.optim.ema_decay, config.optim.ema_start_step)
        self.evaluation = Evaluation(self.attempts, gradients, self.settle, self.average)
        self.optimizer: Optimizer
        self.schedule: LambdaLR
        self.on_settled: list[Callable[[StepResult], object]] = []
        self.on_given_up: Callable[[], object] = lambda: None
        self._unsettled: _Unsettled | None = None
        self._ahead: Attempt | None = None  # at the next step, while the last one is being settled
        self._gap: Gap | None = None  # before an attempt that was taken back
        self._last: StepResult | None = None

    def initialise(self) -> None:
        """Fill the parameters with GPT-2's initial values, by the run's seed."""
        initialise(self.model, self.config.seed, fill)

    def prepare_optimizer(self) -> tuple[Optimizer, LambdaLR]:
        """Build the optimizer and its learning-rate schedule, for the parameters where they are now."""
        config = self.config
        self.optimizer = build_optimizer(self.model, config.optim, config.optimizer, config.seed)
        self.schedule = build_schedule(self.optimizer, config.optim, last_step(config))
        self.attempts.steps_in_fp8 = steps_in_fp8(config)
        self.average.begin()
        return self.optimizer, self.schedule

    def _memory_of_update(self) -> list[Tensor]:
        """Allocate what an update needs beside gradients: the optimizer's state, and buckets beside CUDA graphs."""
        state = [] if self.optimizer.state else state_like(self.model, self.config.optimizer)
        return state + (self.exchange.copies() if self.plan.backend.graphs else [])

    # The step

    def __call__(
        self, ids: Tensor, apply: Callable[[], object] | None = None, done: Callable[[], object] | None = None
    ) -> Tensor:
        """Compute one optimizer step. Collective.

        Returns this rank's mean loss, a float32 scalar on the device. A step that is run again in bf16 once its verdict
        is known has another in `last`.

        Args:
            ids: int32 [sequences, n_positions + 1], this rank's share of the step; -1 is padding.
            apply: makes the update, through whatever wraps the optimizer; None: the optimizer's own `step`.
            done: called once the step is settled, before the next one changes weights.

        Raises what settling the step before raises: a run may have to roll back.
        """
        done_steps = self.schedule.last_epoch + (self._unsettled is not None)
        self._gap = None
        if self._unsettled is not None and self.attempts.go_ahead(done_steps):
            try:
                self._ahead = self.attempts.make(ids, done_steps)
            except BaseException:  # it comes as if the last step had been settled before it
                if not collectives.is_distributed():  # other ranks may have had no error
                    self.settle()
                raise
        try:
            self.settle()
        except BaseException:
            self._take_back()
            raise
        attempt, self._ahead = self._ahead, None
        if attempt is None:
            attempt = self.attempts.make(ids, done_steps, first=self._last is None, gap=self._gap)
        result = self._update(attempt, attempt.loss, apply or self.optimizer.step, attempt.amax_outliers)
        self._unsettled = _Unsettled(attempt, result, done or (lambda: None))
        return loss_parts(attempt.loss)[0]

    def _take_back(self) -> None:
        """Leave gradients, scales and random numbers as they were before the attempt that is ahead, if there is one."""
        if self._ahead is not None:
            self._gap = self._ahead.gap
            self.attempts.take_back(self._ahead)
            self._ahead = None

    def settle(self) -> None:
        """Finish the last step once the host knows its verdict; do nothing if that is done. Collective.

        A step that was not finite in FP8 is run again in bf16. Amaxes that have jumped are kept from becoming scales.
        Then the schedule moves on, `done` is called, and then the functions in `on_settled`. A hook that asks while the
        step is run again is answered with the one before it.

        Raises RuntimeError within a forward or backward that is ahead: the step before it is not known yet. So it does
        in one of several ranks' `on_settled`: the others would not compute the next gradients again.
        """
        if self._unsettled is None:
            # `done` or one of `on_settled` may ask
            if self._ahead is not None and collectives.is_distributed():
                raise RuntimeError("the state cannot be asked for while a step is being settled: ask in a hook")
            self._take_back()
            return
        if self.attempts.computing_again:
            return
        if self.attempts.computing:
            raise RuntimeError("the last step cannot be read within a forward or backward: use on_train_batch_end")
        attempt, result, done = self._unsettled
        verdict = result.read()
        again = verdict.skipped and self.attempts.in_fp8(self.schedule.last_epoch)
        if again or verdict.amax_outliers:
            self._take_back()
        if again:
            try:
                result = self._run_again_in_bf16(attempt, verdict)
            except Interrupted:  # the second attempt has changed no weight
                self._unsettled = None
                rng.restore_torch(attempt.random)
                self.on_given_up()
                raise
        elif verdict.amax_outliers:
            self.scaling.limit(attempt.parts)
        self._unsettled, self._last = None, result
        self.attempts.note_settled(self.schedule.last_epoch)
        self.schedule.step()
        if self.average.exists and not result.read().skipped:
            self.average.update(self.schedule.last_epoch)
        done()
        for function in self.on_settled:
            function(result)

    def _run_again_in_bf16(self, attempt: Attempt, first: Verdict) -> StepResult:
        """Compute the step once more from the same weights, since its update was left out. Collective."""
        with torch.enable_grad(), in_mode(self.model, training=True):  # a validation may be about to begin
            loss = self.attempts.again_in_bf16(attempt)
        # Not through what wraps the optimizer: it counts steps, and this one is already counted.
        return replace(self._update(attempt, loss, self.optimizer.step), first=first)

    def _update(
        self, attempt: Attempt, loss: Tensor, apply: Callable[[], object], outliers: Tensor | None = None
    ) -> StepResult:
        result = update(self.optimizer, apply, self.exchange, loss, self.config.optim.max_grad_norm, outliers)
        self.attempts.gaps.step_ended(attempt.ids.device)
        return replace(result, gap=attempt.gap)

    # What is asked of it

    @property
    def settles_while_computing(self) -> bool:
        """Return whether the last step is still to be settled, while the device computes the next one.

        On a CPU the next one's gradients would have to be there first: a row of the log would come a step late.
        """
        ahead = self._unsettled is not None and self.attempts.go_ahead(self.schedule.last_epoch + 1)
        return ahead and self.plan.device in COMPUTES_MEANWHILE

    @property
    def last(self) -> StepResult | None:
        """The result of the last step; None before the first."""
        if self._unsettled is not None:  # else what was made ahead can stay
            self.settle()
        return self._last

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a forward pass in training: the largest size known to fit, or else the one to try."""
        return self.attempts.training.size

    def state_dict(self) -> dict[str, Any]:
        """Return what a step needs beside weights, optimizer and schedule.

        That is the micro-batch size, the FP8 scales, how many of the last steps were in bf16, if any, the average of
        the weights, if there is one, and with `document_mask` the mask's rule: the text that gave it need not be there
        when the model is used.
        """
        self.settle()
        more: dict[str, Any] = {} if self.model.separator is None else {"separator_begins": self.model.separator_begins}
        if self.attempts.last_in_bf16:
            more["last_in_bf16"] = self.attempts.last_in_bf16
        if average := self.average.state_dict():
            more["average"] = average
        return {"micro_batch_size": self.attempts.state_dict(), "scaling": self.scaling.state_dict(), **more}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue a run where its checkpoint left it. Scales wait until the layers are on their device."""
        if sizes := saved.get("micro_batch_size"):  # not in checkpoints of format 1
            self.attempts.load_state_dict(sizes)
        self.scaling.load_state_dict(saved.get("scaling", {}))
        self.attempts.last_in_bf16 = saved.get("last_in_bf16", 0)
        self.average.load_state_dict(saved.get("average"))
        self.model.separator_begins = saved.get("separator_begins", self.model.separator_begins)
