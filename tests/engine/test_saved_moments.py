"""Saved states of every optimizer: those of a run are taken, and damaged ones refused."""

import copy

import pytest
import torch

from gpt2_fp8.engine.optim import build_optimizer
from gpt2_fp8.engine.saved_moments import check_moments
from tests.common import OPTIM, build
from tests.model.test_optimizer_bytes import CHOICES

UPDATES = 3


@pytest.fixture(scope="module", params=CHOICES, ids=lambda choice: choice.name)
def saved(request):
    """A fresh optimizer, and the state of one like it after some updates."""
    model = build()
    optimizer = build_optimizer(model, OPTIM, request.param)
    generator = torch.Generator().manual_seed(0)
    for update in range(UPDATES):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 100.0**-update
        optimizer.step()
    return build_optimizer(build(), OPTIM, request.param), optimizer.state_dict()


def test_a_state_of_this_optimizer_is_taken(saved):
    check_moments(*saved)
    saved[0].load_state_dict(copy.deepcopy(saved[1]))


def every_change(state):
    """Every tensor of the first parameter of each kind of state, damaged in each way that it can be."""
    kinds = {tuple(sorted(tensors)) + tuple(t.dtype for t in tensors.values()): i for i, tensors in state.items()}
    for index in kinds.values():
        for name, tensor in state[index].items():
            yield index, name, None, "missing"
            yield index, name, torch.zeros(7, dtype=tensor.dtype), r"is \(7,\), and belongs to"
            for dtype in {torch.float32, torch.bfloat16, torch.uint8, torch.float64} - {tensor.dtype}:
                yield index, name, tensor.to(dtype), "is of torch"
        yield index, "another", torch.zeros(()), "has no 'another'"


def test_a_damaged_state_is_refused(saved):
    optimizer, good = saved
    count = 0
    for index, name, tensor, words in every_change(good["state"]):
        state = copy.deepcopy(good)
        state["state"][index].pop(name, None)
        if tensor is not None:
            state["state"][index][name] = tensor
        with pytest.raises(ValueError, match=words):
            check_moments(optimizer, state)
        count += 1
    assert count > 15


@pytest.mark.parametrize("other", CHOICES, ids=lambda choice: choice.name)
def test_another_optimizers_state_is_refused(saved, other):
    optimizer, good = saved
    fresh = build_optimizer(build(), OPTIM, other)
    same = type(fresh) is type(optimizer) and getattr(fresh, "_eight_bits", 0) == getattr(optimizer, "_eight_bits", 0)
    if same:
        check_moments(fresh, good)
    else:
        with pytest.raises(ValueError, match=r"optimizer|argument"):
            check_moments(fresh, good)
