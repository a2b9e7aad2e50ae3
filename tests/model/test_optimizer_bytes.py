"""The estimate of an optimizer's state is what it then takes."""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8.config.schema import AdamWOptimizer, MuonOptimizer
from gpt2_fp8.engine.optim import build_optimizer, state_like
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import optimizer_bytes
from tests.common import CONFIG, OPTIM, VOCAB, build

MUON = MuonOptimizer(name="muon", matrix_lr=None, momentum=0.95, ns_steps=5)
CHOICES = [*(AdamWOptimizer(name=name) for name in ("adamw", "adamw_bf16")), MUON]


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_bytes_are_those_of_the_state(choice, mlp):
    config = replace(CONFIG, mlp=mlp, mlp_width=136, tied_head=mlp == "gelu")
    model = build(config)
    optimizer = build_optimizer(model, OPTIM, choice)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [x for of in optimizer.state.values() for name, x in of.items() if name != "step"]
    wanted = optimizer_bytes(choice, config, padded_vocabulary(VOCAB))
    assert size(state) == wanted
    assert size(state_like(model, choice)) == wanted, "what is held while the first gradients are computed"
