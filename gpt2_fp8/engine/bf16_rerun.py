"""A step of an FP8 run computed in bf16, when it has gone wrong in FP8. Rare, so simple and not fast. Plain torch.

Transformer Engine's layers compute in bf16 outside of `te.autocast`. The fused layers cannot: for them there is a
second model of plain-torch layers around the very same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gpt2_fp8 import layers
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.step import LossOf, accumulate
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.loss import cross_entropy, split

Context = Callable[[], AbstractContextManager]


def twin_of(model: GPT2, recompute: bool = False) -> GPT2:
    """A model of the reference layers whose parameters are those of `model`, the tied ones tied."""
    with torch.device("meta"):
        twin = GPT2(model.config, model.vocab_size, layers.load("reference", recompute=recompute))
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, _ in list(twin.named_parameters(remove_duplicate=False)):
        place, _, last = name.rpartition(".")
        setattr(twin.get_submodule(place), last, own.pop(name))
    assert not own, "the families have the same parameters"
    return twin


class BF16Gradients:
    """The gradients of one optimizer step in bf16.

    `loss_of(ids, is_first_microbatch, scale)`: where the model's own layers can do it; else there is a twin.
    """

    def __init__(self, config: RunConfig, model: GPT2, loss_of: LossOf | None = None):
        self.model, self._loss_of = model, loss_of
        self._recompute = config.activation_checkpointing == "mlp"
        self._twin: GPT2 | None = None

    def __call__(
        self, ids: Tensor, context: Context, backward: Callable[[Tensor], None], micro_batch_size: int
    ) -> Tensor:
        """As `step.accumulate`: into `.grad` the gradients of the mean loss over `ids` [sequences, n_positions + 1];
        returns that loss."""
        return accumulate(ids, micro_batch_size, self._loss, context, backward)

    def _loss(self, ids: Tensor, is_first_microbatch: bool | None, scale: float) -> Tensor:
        if self._loss_of is not None:
            return self._loss_of(ids, None, scale)
        if self._twin is None:
            self._twin = twin_of(self.model, self._recompute)
        inputs, targets = split(ids)
        return cross_entropy(self._twin(inputs), targets, self.model.vocab_size, fused=ids.is_cuda, scale=scale)
