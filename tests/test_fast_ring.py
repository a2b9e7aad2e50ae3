"""The fast ring refuses what would make it slow."""

import multiprocessing
import os
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer

from tests.fast_ring import PLACES, SECONDS, alone, pytest_collection_modifyitems
from tests.forkserver import ROOT

STARTS = {
    "a subprocess": lambda: subprocess.run([sys.executable, "-c", ""]),
    "a fork": lambda: os.fork(),
    "a worker": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "a training": lambda: Trainer().fit(None),
}


@pytest.mark.parametrize("what", STARTS)
def test_a_fast_test_that_starts_something_fails(what):
    with alone(), pytest.raises(pytest.fail.Exception, match="mark it `whole`"):
        STARTS[what]()


def test_afterwards_processes_are_started_as_before():
    with alone():
        pass
    assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3


class Item:
    """What the ring asks of a test."""

    def __init__(self, place, *marks):
        self.path, self.marks, self.added = ROOT / "tests" / place, marks, []

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, mark):
        self.added.append(mark)


@pytest.mark.parametrize(
    ("item", "fast"),
    [
        (Item("data/test_order.py"), True),
        (Item("test_layering.py"), True),
        (Item("data/test_hub.py", "whole"), False),
        (Item("data/test_files.py", "slow"), False),
        (Item("faults/test_data.py"), False),
        (Item("../gpt2_fp8/data/order.py"), False),
    ],
    ids=lambda value: str(getattr(value, "path", value)).removeprefix(f"{ROOT}/"),
)
def test_which_tests_are_fast(item, fast):
    pytest_collection_modifyitems([item])
    assert ("fast" in item.added) is fast
    assert [mark.args for mark in item.added[1:]] == ([(SECONDS,)] if fast else [])


def test_the_places_exist():
    assert all((ROOT / "tests" / place).exists() for place in PLACES)
