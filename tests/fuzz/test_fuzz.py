"""Some inputs of each class, the same in each test run; for an hour with `-m slow`, always others.

FUZZ_MINUTES says how long the slow one tries, all classes together. What does not hold is printed with the command
that tries it once more.
"""

import os
import random

import pytest

from tests.fuzz.tally import CLASSES, tally

FEW = {"settings": 20, "checkpoints": 12, "pointers": 8, "logs": 10, "data files": 12}  # a minute in all


@pytest.mark.parametrize("name", CLASSES)
def test_a_few_of_each_hold(name):
    found = tally(name, seed=1, most=FEW[name])
    assert found.tried == FEW[name]
    assert not found.broken, "\n".join(found.broken)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_many_of_each_hold(name):
    seed, minutes = random.SystemRandom().randrange(10**9), float(os.environ.get("FUZZ_MINUTES", "60"))
    found = tally(name, seed, seconds=60 * minutes / len(CLASSES))
    print(f"{name}: {found.held} of {found.tried} held, seed {seed}")
    assert not found.broken, "\n".join(found.broken)
