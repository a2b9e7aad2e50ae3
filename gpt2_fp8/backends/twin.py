"""A twin: a second model that shares the parameters of the first, and computes in bf16."""

from __future__ import annotations

import torch

from gpt2_fp8.config.schema import AttentionKernel, Recompute
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2


def twin_of(model: GPT2, recompute: Recompute = "none", kernel: AttentionKernel = "auto") -> GPT2:
    """Build a model of the reference layers that shares the parameters of `model`, tied ones included.

    `kernel`: what computes attention.
    """
    with torch.device("meta"):
        layers, borders = Composed(reference, recompute, kernel), (model.separator, model.separator_begins)
        twin = GPT2(model.config, model.vocab_size, layers, (), *borders)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, _ in list(twin.named_parameters(remove_duplicate=False)):
        place, _, last = name.rpartition(".")
        setattr(twin.get_submodule(place), last, own.pop(name))
    assert not own, "the families have the same parameters"
    return twin
