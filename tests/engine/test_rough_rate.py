"""The rate that one short forward tells: its arithmetic, and that nothing of the run is another one after it."""

import itertools

import pytest
import torch

from gpt2_fp8.backends.resolve import resolve
from gpt2_fp8.compose import preflight
from gpt2_fp8.engine import rough_rate
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.model.flops import flops_per_token
from gpt2_fp8.runtime import rng
from tests.runs import SMALL, assert_equal

DELAYED = ["precision=fp8_hybrid", "recipe=delayed", "precision.backend=emulated", "model.n_head=1"]


def step(*words):
    (config,) = preflight([*SMALL, "model.dropout=0.1", *words])
    made = TrainingStep(config, resolve(config, "cpu"), 257)
    made.initialise()
    made.prepare_optimizer()
    return made


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(rough_rate, "_SMALL", 0.0)


def test_a_small_step_tells_more_itself():
    """A tiny forward of 64 tokens is mostly what calls cost: on a busy machine the guess was 30 times off."""
    (tiny,), (gpt2,) = preflight([]), preflight(["model=gpt2", "data.tokenizer=gpt2"])
    flops = [
        config.global_batch_size * config.model.n_positions * flops_per_token(config.model, vocabulary)
        for config, vocabulary in ((tiny, 320), (gpt2, 50304))
    ]
    assert flops[0] < rough_rate._SMALL < flops[1] / 1000
    assert rough_rate.tokens_per_second(step("precision=fp32"), clock=None) is None


@pytest.mark.usefixtures("any_size")
def test_the_arithmetic_is_that_of_a_model_whose_sequences_are_short():
    """A forward of 64 tokens in 2 s; training a token takes three times as much."""
    made = step("precision=fp32", "model.n_positions=64")
    ticks = itertools.count(step=2.0)
    first = iter([0.0, 2.9, 3.0, 5.0])  # the quickest counts, of what 3 s have room for
    assert rough_rate.tokens_per_second(made, lambda: next(first)) == pytest.approx(64 / 2.0 / 3)
    assert rough_rate.tokens_per_second(made, lambda: next(ticks)) == pytest.approx(64 / 2.0 / 3)
    longer = step("precision=fp32", "model.n_positions=1024")
    more = flops_per_token(longer.config.model, 320) / flops_per_token(made.config.model, 320)
    assert more > 1.5, "attention over 1,024 tokens"
    # One table of positions is longer, and is only looked up.
    assert rough_rate.tokens_per_second(longer, lambda: next(ticks)) == pytest.approx(64 / 2.0 / 3 / more)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("words", [["precision=fp32"], ["precision=bf16"], DELAYED], ids=["fp32", "bf16", "delayed"])
def test_a_step_after_it_is_the_same_to_the_last_bit(words):
    """Loss, weights, generators and FP8 scales, with dropout."""
    ids = torch.randint(0, 257, (8, 33), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    ends = []
    for looked in (False, True):
        torch.manual_seed(1)
        made = step(*words)
        if looked:
            assert rough_rate.tokens_per_second(made) > 0
        for _ in range(2):
            made(ids)
        state = dict(made.model.state_dict())
        ends.append([made.last.read().loss, state, made.state_dict(), rng.capture_torch()])
    assert_equal(*ends, "end")
