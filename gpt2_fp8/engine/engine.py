"""How a run computes: the model of its plan, the loss, and the gradients of one optimizer step. Plain torch.

The LightningModule trains through it and the benchmark times it, so what is measured is what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gpt2_fp8 import layers
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.bf16_rerun import BF16Gradients
from gpt2_fp8.engine.compile import compiled
from gpt2_fp8.engine.cuda_graphs import GraphedGradients
from gpt2_fp8.engine.step import accumulate
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.loss import cross_entropy, split
from gpt2_fp8.precision import magnitudes, state
from gpt2_fp8.precision.calibrate import calibrate
from gpt2_fp8.precision.recipes import delayed_scaling
from gpt2_fp8.precision.resolve import Plan

Context = Callable[[], AbstractContextManager]


class Engine:
    """The model of a run, its parameters still to be filled (`model.initialise`, or a state dict), and its gradients.

    The layers are built on torch's default device: build inside `with torch.device("cuda")` for a GPU, as Lightning
    does.
    """

    def __init__(self, config: RunConfig, plan: Plan, vocab_size: int):
        self.config, self.plan, self.vocab_size = config, plan, vocab_size
        keep_bf16 = getattr(config.precision, "keep_bf16", ())
        scaling = delayed_scaling(config) if plan.backend == "fused" else None
        family = layers.load(plan.backend, scaling, recompute=config.activation_checkpointing == "mlp")
        self.model = GPT2(config.model, vocab_size, family, keep_bf16)
        self.parameters = list(self.model.parameters())
        self.micro_batch_size = config.micro_batch
        self._loss_of = compiled(self._loss) if plan.compile else self._loss
        self._graphed: GraphedGradients | None = None
        self._in_bf16: BF16Gradients | None = None
        self._begin_again: Callable[[], None] = _nothing
        self._micro_batches = 1  # of the last step

    def _loss(self, ids: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0) -> Tensor:
        inputs, targets = split(ids)
        x = self.model.features(inputs, is_first_microbatch)
        if chunked := getattr(self.model.head, "loss", None):
            return chunked(x, targets, self.vocab_size, scale, is_first_microbatch)
        logits = self.model.head(x, is_first_microbatch)
        return cross_entropy(logits, targets, self.vocab_size, self.plan.fp8, scale)

    def loss(self, ids: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0) -> Tensor:
        """`scale` times the mean loss over the targets of `ids` [sequences, n_positions + 1], float32. Call it inside
        the precision's forward context. `is_first_microbatch`: see `GPT2.forward`."""
        if not self.plan.fp8:
            is_first_microbatch = None  # one compiled graph, not one for each value of the flag
        return self._loss_of(ids, is_first_microbatch, scale)

    def gradients(self, ids: Tensor, context: Context, backward: Callable[[Tensor], None]) -> Tensor:
        """Gradients of the mean loss over one optimizer step's `ids`, into `.grad`, in micro-batches of
        `micro_batch_size`; returns that loss. See `step.accumulate`; where the plan says CUDA graphs, they are replayed
        instead, and `backward` is not called."""
        self._remember()
        parts = ids.split(self.micro_batch_size)
        self._micro_batches = len(parts)
        if self.plan.graphs:
            if self._graphed is None:
                self._graphed = GraphedGradients(self.model, self.loss, context)
            return self._graphed(parts)
        return accumulate(ids, self.micro_batch_size, self.loss, context, backward)

    def like_moments(self) -> list[Tensor]:
        """As much memory as the first update will allocate for AdamW's moments. To be held while the first gradients
        are computed, so that what fits without moments is not taken for what fits, and so that they count among a
        recording's peak: what a graph has recorded keeps its memory, and is not counted as allocated."""
        return [torch.empty_like(parameter) for parameter in self.parameters for _ in range(2)]

    def gradients_in_bf16(
        self, ids: Tensor, context: Context, backward: Callable[[Tensor], None], micro_batch_size: int
    ) -> Tensor:
        """The same in bf16, for a step of an FP8 run that has to be run again: see `bf16.BF16Gradients`. `context` is
        bf16 autocast alone. Nothing of FP8's is used, and no scale or history changes."""
        self._begin_again = _nothing
        if self._in_bf16 is None:
            own = self._loss if self.plan.backend == "te" else None  # outside of te.autocast they are bf16 layers
            self._in_bf16 = BF16Gradients(self.config, self.model, own)
        return self._in_bf16(ids, context, backward, micro_batch_size)

    def _remember(self) -> None:
        self._begin_again = _nothing  # should there be no memory for the next line: not another step's
        if self.plan.fp8:
            self._begin_again = state.kept(self.model)

    def forget(self) -> None:
        """Let go of what a step that did not come to its end, or that another rank's did not, has left: gradients, and
        graphs with their memory. Scales and histories are again as the step found them."""
        self._graphed = None
        self.model.zero_grad(set_to_none=True)
        for block in self.model.blocks:
            if callable(forget := getattr(block, "forget", None)):  # the fused layers'
                forget()
        self.undo_scales()
        if self.plan.compile:
            torch.compiler.reset()  # or else it would compile the other size for sizes of every kind, which are slower

    def undo_scales(self) -> None:
        """Scales and histories again as the last step found them. For a step whose update was left out: what came
        before its first number that was not finite may be finite and absurd, and would rule scales for as long as the
        history is. All ranks do this, or none."""
        self._begin_again()
        self._begin_again = _nothing

    def calibrate(self, ids: Tensor, context: Context) -> None:
        """Find delayed scaling's first scales, from one micro-batch of an optimizer step's `ids`."""
        part = ids[: self.micro_batch_size]
        self._remember()
        calibrate(self.model, self.loss, part, context, share=len(part) / len(ids))

    def absurd_magnitudes(self) -> Tensor | None:
        """How many FP8 tensors' largest magnitudes have jumped in this step: see `precision.magnitudes`."""
        return magnitudes.absurd(self.model, self._micro_batches) if self.plan.fp8 else None

    def limit_magnitudes(self) -> None:
        """Keep them from becoming scales. Before the next forward."""
        magnitudes.limit(self.model, self._micro_batches)

    def agree(self) -> None:
        """Make all ranks' scales and histories one: see `state.agree`."""
        state.agree(self.model)


def _nothing() -> None:
    """There is nothing to put back."""
