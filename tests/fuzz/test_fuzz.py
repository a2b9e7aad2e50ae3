"""Some inputs of each class, the same in each test run; for an hour with `-m slow`, always others.

FUZZ_MINUTES says how long the slow one tries, all classes together. What does not hold is printed with the command
that tries it once more.
"""

import importlib
import json
import os
import random
import subprocess
import sys

import pytest

from tests.forkserver import ROOT
from tests.fuzz.tally import CLASSES, drawn, tally

FEW = {"settings": 20, "checkpoints": 9, "pointers": 8, "logs": 8, "data files": 10}  # under a minute in all


@pytest.mark.parametrize("name", CLASSES)
def test_a_few_of_each_hold(name):
    found = tally(name, seed=1, most=FEW[name])
    assert found.tried == FEW[name]
    assert not found.broken, "\n".join(found.broken)


def test_a_seed_draws_the_same_whatever_is_imported():
    importlib.import_module("gpt2_fp8.compose.benchmark")
    code = "import json; from tests.fuzz.tally import *; print(json.dumps([[*drawn(one, 1, 20)] for one in CLASSES]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[*drawn(name, 1, 20)] for name in CLASSES]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_many_of_each_hold(name):
    seed, minutes = random.SystemRandom().randrange(10**9), float(os.environ.get("FUZZ_MINUTES", "60"))
    found = tally(name, seed, seconds=60 * minutes / len(CLASSES))
    print(f"{name}: {found.held} of {found.tried} held, seed {seed}")
    assert not found.broken, "\n".join(found.broken)
