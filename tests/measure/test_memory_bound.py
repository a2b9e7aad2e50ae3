"""What cannot fit this machine's memory, by arithmetic alone."""

import os

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.measure import memory_bound

GIB = 2**30


def too_large(*words, device="cpu", steps=3):
    (config,) = compose.preflight(["trainer=cpu", "model=gpt2", "data.tokenizer=gpt2", "run_name=x", *words])
    return memory_bound.too_large(config, device, steps)


@pytest.fixture
def machine(monkeypatch):
    """Gives the machine so many GiB."""
    return lambda size: monkeypatch.setattr(memory_bound, "machine_bytes", lambda: size and int(size * GIB))


ONE = ["micro_batch_size=1", "global_batch_size=1"]


@pytest.mark.parametrize(
    ("words", "least", "what"),
    [
        (ONE, 16 * 124_440_000 / GIB, "parameters, gradients and optimizer state"),
        (["micro_batch_size=16", "global_batch_size=16"], 4 * 16 * 1024 * 50257 / GIB, "the logits of a forward pass"),
        (["micro_batch_size=1", "global_batch_size=999999"], 4 * 999999 * 1025 * 3 / GIB, "the tokens of 3 steps"),
    ],
)
def test_the_largest_part_decides_on_a_cpu(words, least, what, machine):
    machine(least * 0.99)
    assert too_large(*words) == (
        f"needs about {least:,.1f} GiB for {what}, and this machine has {least * 0.99:,.1f} GiB"
    )
    machine(least * 1.01)
    assert too_large(*words) is None


def test_a_gpu_speaks_for_itself_but_not_for_the_hosts_tokens(machine):
    machine(1)
    assert too_large(*ONE, "model.n_layer=1000000", device="cuda") is None
    assert too_large("micro_batch_size=1", "global_batch_size=300000", device="cuda") == (
        "needs about 1.1 GiB for the tokens of a step, and this machine has 1.0 GiB"
    )


def refuse(name):
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize("answer", [lambda name: -1, refuse])
def test_where_the_system_does_not_tell_everything_may_fit(answer, monkeypatch):
    assert memory_bound.machine_bytes() > GIB / 4
    monkeypatch.setattr(os, "sysconf", answer)
    assert too_large("micro_batch_size=1", "global_batch_size=999999") is None
