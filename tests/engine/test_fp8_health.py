"""The health of FP8 tensors beside real training steps: it is right, and it changes nothing."""

import math

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.engine.fp8_health import FP8Health, summary
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.backends import Torchao
from gpt2_fp8.fp8.fp8_tensors import fp8_tensors
from gpt2_fp8.fp8.resolve import BACKENDS, Plan
from gpt2_fp8.runtime import rng

SMALL = [
    "trainer=cpu", "model.n_layer=2", "model.n_embd=64", "model.n_head=2", "model.n_positions=64",
    "global_batch_size=8", "micro_batch_size=4", "optim.lr=3e-3",
]  # fmt: skip
EMULATED = "precision.backend=emulated"


def training_step(*words):
    (config,) = compose.preflight([*SMALL, *words])
    name = config.precision.backend
    backend = BACKENDS[name](config, config.precision.name, "cpu")
    backend.compiled = False
    step = TrainingStep(config, Plan("cpu", config.precision.name, config.precision.name, None, backend), 257)
    step.initialise()
    step.prepare_optimizer()
    return step


def ids(seed, tokens=65):
    return torch.randint(0, 257, (8, tokens), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def trained(step, steps, health=None):
    """The losses of some steps as bits; `health` looks between them, as the callback does."""
    losses, seen = [], []
    for i in range(steps):
        step(ids(i))
        losses.append(step.last.read().loss.hex())
        if health is not None:
            seen = health.sample(ids(i), health.read())
    return losses, seen


CASES = [
    [EMULATED, "model.dropout=0.1", "activation_checkpointing=full"],
    *(pytest.param([EMULATED, f"recipe={name}"], marks=pytest.mark.slow) for name in ("current", "block")),
    [EMULATED, "penalty.z_loss=1e-4", "precision.keep_bf16=[first]"],
    ["precision.backend=torchao", "recipe=current"],
]


@pytest.mark.parametrize("words", CASES, ids=lambda words: " ".join(words[1:]) or "delayed")
def test_looking_changes_no_bit_of_a_run(words, monkeypatch):
    monkeypatch.setattr(Torchao, "emulate", True)
    torch.manual_seed(1)
    plain = training_step(*words)
    expected, _ = trained(plain, 4)
    drawn = rng.capture_torch()
    torch.manual_seed(1)
    watched = training_step(*words)
    health = FP8Health(watched)
    losses, seen = trained(watched, 4, health)
    assert losses == expected
    assert torch.equal(rng.capture_torch()["torch"], drawn["torch"])
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, watched.model.state_dict()[name]), name
    before, after = state.capture(plain.model), state.capture(watched.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in watched.model.parameters())
    assert [health.tensor for health in seen] == fp8_tensors(watched.config.precision, watched.config.model.n_layer)
    assert all(0 <= health.saturated < 0.01 and 0 <= health.flushed < 0.1 for health in seen)


@pytest.mark.parametrize("words", [[], ["recipe=current"]], ids=["delayed", "current"])
def test_what_is_seen_is_what_the_layers_have(words):
    """The newest amaxes of an emulated step against what its operands had, and the sampled ones against both."""
    step = training_step(EMULATED, *words)
    weight = step.model.blocks[1].mlp.fc2_weight.detach().clone()
    _, seen = trained(step, 1, FP8Health(step))
    by_name = {str(health.tensor): health for health in seen}
    found = by_name["the weight of blocks.1.fc2"]
    if words:  # sampled after the update
        weight = step.model.blocks[1].mlp.fc2_weight
    assert found.amax == weight.abs().max()
    assert found.headroom == pytest.approx(math.log2(448 / (found.amax * found.scale)))
    assert found.headroom == pytest.approx(0, abs=1e-5)


def test_stored_amaxes_are_those_of_the_sampled_pass():
    """The twin sees the same text as the newest step: its amaxes differ by bf16 and by one update alone."""
    delayed = training_step(EMULATED, "optim.lr=1e-6")
    delayed(ids(0))
    delayed.settle()
    stored = {h.tensor: h.amax for h in FP8Health(delayed).read()}
    current = training_step(EMULATED, "optim.lr=1e-6", "recipe=current", "micro_batch_size=8")
    current(ids(0))
    current.settle()
    watching = FP8Health(current)
    watching._pass.backend = current.plan.backend
    sampled = {h.tensor: h.amax for h in watching.sample(ids(0), [])}
    assert len(stored) == len(sampled)
    for tensor, amax in stored.items():
        assert sampled[tensor] == pytest.approx(amax, rel=0.1), tensor


def test_the_heads_scale_is_that_of_the_runs_micro_batches(monkeypatch):
    """Of four sequences of 64 tokens, also where fewer are sampled."""
    monkeypatch.setattr(Torchao, "emulate", True)
    step, asked = training_step("precision.backend=torchao", "recipe=current"), []
    step.model.head.gradient_factor = lambda rows: asked.append(rows) or 2**11
    monkeypatch.setattr("gpt2_fp8.engine.fp8_health.TOKENS", 128)
    _, seen = trained(step, 1, FP8Health(step))
    assert asked == [4 * 64]
    (head,) = [health for health in seen if str(health.tensor) == "the gradient of head"]
    assert head.scale == 2**11 * 8 * 64, "the mean over a step's tokens is taken back"
    assert head.headroom == pytest.approx(math.log2(28), abs=0.1), "softmax minus one is nearly -1 at a target"


def test_a_scale_that_is_too_small_flushes_and_one_too_large_saturates():
    step = training_step(EMULATED)
    health = FP8Health(step)
    trained(step, 1)
    healthy = summary(health.sample(ids(0), health.read()))
    step.model.scales.scale.mul_(2.0**-16)
    small = summary(health.sample(ids(0), health.read()))
    step.model.scales.scale.mul_(2.0**20)
    large = summary(health.sample(ids(0), health.read()))
    assert healthy["fp8/flushed_input"] < 0.01 < 0.5 < small["fp8/flushed_input"]
    assert healthy["fp8/saturated_weight"] == 0
    assert large["fp8/saturated_weight"] > 0.5
    assert small["fp8/headroom_weight"] == pytest.approx(16, abs=0.1)
    assert (small["fp8/scale_jump"], large["fp8/scale_jump"]) == (16, 20)
