"""How long a run takes, by a clock of the test's own."""

import pytest

from gpt2_fp8.engine.pace import Pace


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def steps(pace, clock, ends):
    """Let steps end at these seconds."""
    for step, at in ends.items():
        clock.now = at
        pace.step_ended(step)


def test_the_first_step_does_not_count(clock):
    """It took 60 s, and the next two 2 s each, so 97 steps take 194 s."""
    pace = Pace(100, clock=clock)
    steps(pace, clock, {1: 160.0, 2: 162.0, 3: 164.0})
    assert (pace.steps, pace.seconds) == (2, 4.0)
    assert pace.left(3) == 194.0
    assert pace.left(100) == 0.0


@pytest.mark.parametrize(("limit", "left"), [(50.0, 50.0), (1000.0, 194.0), (0.0, 0.0), (None, 194.0)])
def test_a_time_limit_ends_it_sooner(clock, limit, left):
    pace = Pace(100, lambda: limit, clock)
    steps(pace, clock, {1: 160.0, 3: 164.0})
    assert pace.left(3) == left
