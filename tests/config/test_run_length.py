"""The limits of a run, the steps that they come to, and the share of a process in a step."""

from dataclasses import replace

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import run_length
from gpt2_fp8.config.errors import UserError

STEP = 16 * 256  # tokens of a step of model=tiny


@pytest.fixture(scope="module")
def tiny():
    (config,) = preflight(["optim.warmup_steps=5", "trainer.max_steps=99"])
    return replace(config, trainer=replace(config.trainer, max_steps=None))


def limited(config, **limits):
    return replace(config, trainer=replace(config.trainer, **limits))


@pytest.mark.parametrize(
    ("tokens", "steps"), [(STEP, 1), (2 * STEP - 1, 1), (2 * STEP, 2), (100 * STEP + 1, 100)], ids=lambda n: f"{n:,}"
)
def test_a_budget_of_tokens_is_not_passed(tiny, tokens, steps):
    assert run_length.last_step(limited(tiny, max_tokens=tokens)) == steps


@pytest.mark.parametrize(
    ("epochs", "text", "steps"), [(1, STEP, 1), (1, STEP + 1, 2), (2, STEP + 1, 3), (3, 5, 1), (2, 10 * STEP, 20)]
)
def test_epochs_end_when_all_their_tokens_were_used(tiny, epochs, text, steps):
    asked = limited(tiny, max_epochs=epochs)
    assert run_length.limits(asked) == {}, "nobody has counted yet"
    assert run_length.in_steps(asked, text).trainer.max_steps == steps
    assert run_length.epoch_ends(asked, text)[-1] == steps
    assert run_length.epoch_ends(limited(asked, max_steps=1), text) == [end for end in (1,) if text <= STEP]


@pytest.mark.parametrize(
    ("limits", "limit", "steps"),
    [
        ({"max_steps": 9, "max_tokens": 10 * STEP}, "trainer.max_steps", 9),
        ({"max_steps": 11, "max_tokens": 10 * STEP}, "trainer.max_tokens", 10),
        ({"max_steps": 11, "max_tokens": 10 * STEP, "max_epochs": 2}, "trainer.max_epochs", 8),
        ({"max_steps": 7, "max_epochs": 2}, "trainer.max_steps", 7),
    ],
)
def test_the_shortest_limit_holds(tiny, limits, limit, steps):
    asked = limited(tiny, **limits)
    assert run_length.shortest(asked, 4 * STEP) == limit
    counted = run_length.in_steps(asked, 4 * STEP)
    assert run_length.last_step(counted) == steps
    assert run_length.in_steps(counted, 4 * STEP) == counted, "a resumed run's configuration comes to the same"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("00:00:00:01", 1), ("00:12:00:00", 43200), ("2:01:01:01", 176461), ("12h", None), ("1:00:00", None), ("x", None)],
)
def test_times(time, seconds):
    assert run_length.seconds(time) == seconds


def test_what_is_counted_late_is_checked_late(tiny):
    """A warm-up that is longer than the epochs."""
    asked = limited(tiny, max_epochs=1)
    assert (list(run_length.check(asked)), list(run_length.check(asked, 5 * STEP))) == ([], [])
    (found,) = run_length.check(asked, 4 * STEP)
    assert "trainer.max_epochs=1, optim.warmup_steps=5: the warm-up is longer" in found.cause


@pytest.mark.parametrize(
    ("whole", "micro", "processes", "expected"),
    [
        (16, 16, 1, 16), (16, 16, 2, 8), (16, 16, 4, 4), (16, 4, 4, 4), (24, 8, 2, 6), (16, 16, 3, 16),
        (4, 16, 1, 4), (24, 16, 1, 12), (512, 64, 16, 32), (16, "auto", 4, "auto"), (7, 7, 7, 1),
    ],
)  # fmt: skip
def test_it_divides_the_share(whole, micro, processes, expected):
    (config,) = preflight(["trainer=cpu"])
    config = replace(config, global_batch_size=whole, micro_batch_size=micro)
    lowered = run_length.fit_micro_batch(config, processes, ())
    assert lowered.micro_batch_size == expected
    assert len(list(run_length.describe_micro_batch(config, lowered))) == (expected != micro)


def test_what_was_typed_is_kept():
    (config,) = preflight(["trainer=cpu"])
    assert run_length.fit_micro_batch(config, 4, {"micro_batch_size"}) is config
    with pytest.raises(UserError, match="a step of 4 sequences does not divide into forward passes of 16"):
        preflight(["global_batch_size=4", "micro_batch_size=16"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (300, None, None)),
        (["trainer.max_epochs=2"], (None, None, 2)),
        (["trainer.max_tokens=100000"], (None, 100000, None)),
        (["trainer.max_epochs=2", "trainer.max_steps=7"], (7, None, 2)),
        (["trainer.max_epochs=2", "trainer.max_steps=null"], (None, None, 2)),
        (["debug=profiler"], (20, None, None)),
        (["debug=profiler", "++trainer.max_tokens=100000"], (None, 100000, None)),
        (["trainer.max_time=00:01:00:00"], (300, None, None)),
    ],
)
def test_a_typed_limit_replaces_those_of_groups(words, expected):
    (config,) = preflight(["trainer=cpu", *words])
    assert (config.trainer.max_steps, config.trainer.max_tokens, config.trainer.max_epochs) == expected
