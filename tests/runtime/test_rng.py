"""Capturing and restoring every generator."""

import random

import numpy
import pytest
import torch

from gpt2_fp8.checkpoint import tree
from gpt2_fp8.runtime import rng


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(3).tolist(),
        numpy.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    ]


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


def test_ranks(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        states = rng.gather()
        assert len(states) == 1
        expected = draw()
        rng.begin_rank(states, seed=0, step=1)
        assert draw() == expected
    finally:
        torch.distributed.destroy_process_group()
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
