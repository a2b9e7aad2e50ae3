"""Capturing and restoring every generator."""

import random

import numpy
import pytest
import torch

from gpt2_fp8.checkpoint import tree
from gpt2_fp8.runtime import rng


def draw():
    return [
        random.random(), random.gauss(0, 1), numpy.random.rand(3).tolist(), numpy.random.standard_normal(),
        torch.rand(3).tolist(), torch.randn(1).item(),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def keep():
    state = rng.capture()
    yield
    rng.restore(state)


def test_restored_generators_go_on_as_they_did_also_through_a_checkpoint():
    random.gauss(0, 1)  # leaves its second value in the state
    numpy.random.standard_normal()
    skeleton, tensors = tree.flatten(rng.capture())
    expected = draw()
    for _ in range(1000):  # beyond the state that was captured
        assert draw() != expected
    rng.restore(tree.unflatten(skeleton, tensors.__getitem__))
    assert draw() == expected


def test_a_rank_goes_on_from_its_state():
    states = rng.gather()
    expected = draw()
    rng.begin_rank(states, seed=0, step=1)
    assert draw() == expected


def test_a_rank_without_a_state_draws_numbers_of_its_own(monkeypatch):
    def drawn(rank, seed=1, step=0):
        monkeypatch.setattr(rng.collectives, "rank_and_world", lambda: (rank, 4))
        torch.manual_seed(1)
        rng.begin_rank([], seed, step)
        return tuple(torch.rand(3).tolist())

    torch.manual_seed(1)
    alone = tuple(torch.rand(3).tolist())
    assert drawn(0) == alone
    others = [drawn(0), drawn(1), drawn(2), drawn(3), drawn(1, seed=2), drawn(1, step=4)]
    assert len(set(others)) == 6
    assert drawn(3) == others[3]
