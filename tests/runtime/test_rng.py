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
    assert draw() != expected
    rng.restore(tree.unflatten(skeleton, tensors.__getitem__))
    assert draw() == expected


def test_a_capture_is_a_copy():
    state = rng.capture()
    expected = draw()
    for _ in range(1000):
        draw()
    rng.restore(state)
    assert draw() == expected


def test_ranks(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        states = rng.gather()
        assert len(states) == 1
        expected = draw()
        assert rng.restore_rank(states)
        assert draw() == expected
    finally:
        torch.distributed.destroy_process_group()
    assert rng.restore_rank(states)
    assert draw() == expected


def test_a_rank_without_a_state_keeps_its_own_seed():
    torch.manual_seed(1)
    expected = draw()
    torch.manual_seed(1)
    random.seed(2)
    before = random.getstate()
    assert rng.restore_rank([]) is False
    assert random.getstate() == before
    assert torch.rand(3).tolist() == expected[4]
