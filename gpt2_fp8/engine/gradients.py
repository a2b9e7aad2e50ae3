"""Forward and backward passes: the gradients of one optimizer step, in micro-batches of a given size. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gpt2_fp8.engine.cuda_graphs import GraphedGradients, compile_function, compile_with_graphs, fill_gradients
from gpt2_fp8.engine.exchange import Exchange
from gpt2_fp8.engine.step import accumulate
from gpt2_fp8.fp8.base import LossOf
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.fp8.scaling import Context, FP8Scaling
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.loss import trained_loss
from gpt2_fp8.runtime import signals
from gpt2_fp8.runtime.sharding import is_divided

Backward = Callable[[Tensor], None]


class Gradients:
    """Computes gradients into the parameters' `.grad`, one micro-batch after the other; no collective in it.

    Args:
        plan: its backend computes.
        model: the backend's.
        scaling: the owner of the model's FP8 scales.
        backward: called with each micro-batch's loss. CUDA graphs do not call it.
        exchange: the owner of the gradients; None: of one process.
        forward_context: the precision that each forward enters; None: the backend's.
    """

    def __init__(
        self,
        plan: Plan,
        model: GPT2,
        scaling: FP8Scaling,
        backward: Backward = Tensor.backward,
        exchange: Exchange | None = None,
        forward_context: Context | None = None,
    ):
        self.plan, self.model, self.scaling = plan, model, scaling
        self.exchange = exchange or Exchange(model.parameters())
        self.forward_context = forward_context or plan.backend.forward_context
        self._backward = backward
        backend = plan.backend
        self._loss_of: LossOf = partial(backend.loss, model)
        if is_divided(model):
            if backend.compiled:  # a unit is gathered between two blocks
                for block in model.blocks:
                    block.forward = compile_function(block.forward, backend.compile_options)
        elif plan.recorded:
            self._loss_of = compile_with_graphs(self._loss_of)
        elif backend.compiled:
            self._loss_of = compile_function(self._loss_of, backend.compile_options)
        self._bf16_model: GPT2 | None = None
        self._compiled_bf16_loss: LossOf | None = None
        self._graphed: GraphedGradients | None = None

    def loss(self, ids: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0) -> Tensor:
        """Compute `scale` times the mean loss over the targets of `ids` [sequences, n_positions + 1], float32.

        With gradients, penalties are part of it: see `model.loss`. Call it inside `forward_context`.
        `is_first_microbatch`: see `GPT2.forward`.
        """
        return self._loss_of(ids, is_first_microbatch, scale)

    def of_step(self, ids: Tensor, micro_batch_size: int) -> Tensor:
        """Compute the gradients of the mean loss over one optimizer step's `ids`; return that loss.

        See `step.accumulate`. CUDA graphs, if used, are recorded at the first call and replayed later.
        """
        with self.exchange.no_sync():
            if self.plan.backend.graphs:  # not ended by signals: a recording must not stop, and replays are short
                if self._graphed is None:
                    self._graphed = GraphedGradients(self.model, self.loss, self.forward_context)
                return self._graphed(ids.split(micro_batch_size))
            if self.plan.recorded:
                fill_gradients(self.exchange.parameters)
            return accumulate(
                ids, micro_batch_size, self.loss, self.forward_context, self._backward, self.exchange.part
            )

    def of_step_in_bf16(self, ids: Tensor, micro_batch_size: int, many: bool = False) -> Tensor:
        """Compute the same in bf16, for a step of an FP8 run. No FP8 scale or history changes.

        `many`: such steps follow each other. They are compiled, if `compile` allows; a single one is not worth it.
        """
        loss_of = self._many_in_bf16() if many and self.plan.compiles_twin else self._bf16_loss
        context = partial(self.plan.backend.forward_context, fp8=False)
        with self.exchange.no_sync():
            return accumulate(ids, micro_batch_size, loss_of, context, self._backward, self.exchange.part)

    def _many_in_bf16(self) -> LossOf:
        """Return `_bf16_loss` under `torch.compile`."""
        model = self._in_bf16()  # each time: a validation has left it in the other mode
        if self._compiled_bf16_loss is None:
            loss_of = compile_function(partial(self.plan.backend.bf16_loss, model, compiled=True))
            self._compiled_bf16_loss = lambda ids, _, scale: loss_of(ids, scale)
        return self._compiled_bf16_loss

    def _bf16_loss(self, ids: Tensor, is_first_microbatch: bool | None, scale: float) -> Tensor:
        return self.plan.backend.bf16_loss(self._in_bf16(), ids, scale)

    def _in_bf16(self) -> GPT2:
        """Return `Backend.bf16_model` of the model, in the same mode: training or evaluation."""
        if self._bf16_model is None:
            self._bf16_model = self.plan.backend.bf16_model(self.model)
        return self._bf16_model.train(self.model.training)

    def evaluate(self, ids: Tensor) -> Tensor:
        """Compute the mean loss over the targets of `ids` [sequences, n_positions + 1], float32, as a validation does.

        No gradients are computed. With `precision.evaluation=bf16` no FP8 scale is needed.
        """
        signals.look()
        loss_of = self._bf16_loss if self.plan.evaluates_in_bf16 else self.loss
        with self.evaluation():
            return loss_of(ids, None, 1.0)

    @contextmanager
    def evaluation(self) -> Iterator[GPT2]:
        """Enter the precision of forwards outside of training, without gradients, and return the model for them."""
        in_bf16 = self.plan.evaluates_in_bf16
        bf16 = partial(self.plan.backend.forward_context, fp8=False)
        with torch.no_grad(), bf16() if in_bf16 else self.forward_context():
            yield self._in_bf16() if in_bf16 else self.model

    def calibrate(self, ids: Tensor, micro_batch_size: int) -> None:
        """Find delayed scaling's first scales from the first micro-batch of `ids`, of a step or of a validation."""

        def loss(part: Tensor) -> Tensor:
            signals.look()
            return trained_loss(self.loss(part))

        with self.exchange.no_sync(), torch.enable_grad():
            self.scaling.calibrate(loss, ids[:micro_batch_size])

    def discard(self) -> None:
        """Free what an unfinished step has left: gradients, and graphs with their memory."""
        self._graphed = None
        self.exchange.give_up()
        for block in self.model.blocks:
            if callable(discard := getattr(block, "discard", None)):  # the fused layers'
                discard()
        if self.plan.backend.compiled or self._compiled_bf16_loss is not None:
            # Without this, torch would compile the new size for dynamic shapes, which are slower.
            torch.compiler.reset()

    def release_graphs(self) -> bool:
        """Free the CUDA graphs with their memory, which nothing else can use; return whether there were any.

        The next step records them again, with the same numbers. The step before must be settled: its gradients go too.
        """
        there = self._graphed is not None
        if there:
            self._graphed = None
            self.exchange.give_up()  # gradients lie in the graphs' memory
        return there
