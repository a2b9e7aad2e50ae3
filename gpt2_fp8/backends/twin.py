"""A twin: a second model that shares the parameters of the first, and computes a step again in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2_fp8.backends.base import LossOf
from gpt2_fp8.config.schema import PenaltyConfig, Recompute
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.loss import loss_of


def twin_of(model: GPT2, recompute: Recompute = "none") -> GPT2:
    """Build a model of the reference layers that shares the parameters of `model`, tied ones included."""
    with torch.device("meta"):
        layers, borders = Composed(reference, recompute), (model.separator, model.separator_begins)
        twin = GPT2(model.config, model.vocab_size, layers, (), *borders)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, _ in list(twin.named_parameters(remove_duplicate=False)):
        place, _, last = name.rpartition(".")
        setattr(twin.get_submodule(place), last, own.pop(name))
    assert not own, "the families have the same parameters"
    return twin


def bf16_loss(model: GPT2, recompute: Recompute, penalty: PenaltyConfig) -> LossOf:
    """Return the loss of a twin of `model`, which is built at the first call. Call it inside `bf16_context`."""
    twin: list[GPT2] = []

    def loss(ids: Tensor, is_first_microbatch: bool | None, scale: float) -> Tensor:
        if not twin:
            twin.append(twin_of(model, recompute))
        return loss_of(twin[0], ids, None, scale, ids.is_cuda, penalty)

    return loss
