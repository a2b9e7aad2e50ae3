"""What is set around a forward that runs again in its backward, on stand-ins of Transformer Engine's global state.

tests/gpu has the real one (`test_te_models`, `test_begin_again`).
"""

import sys
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from gpt2_fp8.layers import te

PACKAGE = "transformer_engine.pytorch"


class Manager:
    """Its `FP8GlobalStateManager`: a region is a word here, with whether its next layer is the first in it."""

    state = ("none", False)

    @classmethod
    def get_autocast_state(cls):
        return cls.state

    @classmethod
    def set_autocast_state(cls, state):
        cls.state = state


class Phase:
    """Its `activation_recompute_forward`, which hands the queue's oldest entry to any second pass."""

    _is_first_fp8_module: ClassVar = []
    now = None

    def __init__(self, activation_recompute=False, recompute_phase=False):
        self.phase = ("first", "second")[recompute_phase] if activation_recompute else None

    def __enter__(self):
        if self.phase == "first":
            self._is_first_fp8_module.append(Manager.state[1])
        else:
            Manager.state = (Manager.state[0], self._is_first_fp8_module.pop(0))
        Phase.now = self.phase

    def __exit__(self, *error):
        Phase.now = None


@pytest.fixture
def passes(monkeypatch):
    """The passes of `block`: which block, in which phase, in which region."""
    for name in (PACKAGE.partition(".")[0], PACKAGE, f"{PACKAGE}.distributed", f"{PACKAGE}.quantization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[f"{PACKAGE}.distributed"].activation_recompute_forward = Phase
    sys.modules[f"{PACKAGE}.quantization"].FP8GlobalStateManager = Manager
    monkeypatch.setattr(Manager, "state", ("none", False))
    monkeypatch.setattr(Phase, "_is_first_fp8_module", [])
    return []


def block(passes, number, fails=False):
    def part(x):
        passes.append((number, Phase.now, Manager.state))
        if fails and Phase.now == "second":
            raise torch.OutOfMemoryError
        Manager.state = (Manager.state[0], False)  # as the first layer of a region leaves it
        return (x * x).exp()

    return part


def test_the_second_pass_has_the_region_of_the_first(passes):
    x = torch.ones(2, requires_grad=True)
    Manager.state = ("fp8", True)
    y = x
    for number in (0, 1):
        y = te.again(block(passes, number), y, draws=False)
    Manager.state = ("none", False)
    y.sum().backward()
    assert passes == [
        (0, "first", ("fp8", True)),
        (1, "first", ("fp8", False)),
        (1, "second", ("fp8", False)),
        (0, "second", ("fp8", True)),
    ]
    assert Manager.state == ("none", False)
    assert Phase.now is None
    expected = torch.ones(2, requires_grad=True)
    ((expected * expected).exp() ** 2).exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_a_second_pass_that_fails_leaves_the_region(passes):
    x = torch.ones(2, requires_grad=True)
    Manager.state = ("fp8", True)
    y = te.again(block(passes, 0, fails=True), x, draws=False)
    Manager.state = ("outside", False)
    with pytest.raises(torch.OutOfMemoryError):
        y.sum().backward()
    assert Manager.state == ("outside", False)
    assert Phase.now is None
