"""How a run computes: the engine's gradients are the plain step's, and what is recomputed changes no bit."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.engine.step import accumulate
from gpt2_fp8.fp8.backends import Reference
from gpt2_fp8.fp8.base import twin_of
from gpt2_fp8.fp8.resolve import Plan, resolve
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2, initialise
from tests.common import VOCAB, ids, loss_of
from tests.runs import SMALL

POSITIONS = 32
MICRO = 4


def composed(*overrides):
    (config,) = compose.preflight([*SMALL, "precision=fp32", *overrides])
    assert (config.model.n_positions, config.micro_batch_size) == (POSITIONS, 4)
    return config


class Plain(Reference):
    """The reference backend, with autocast where a test asks for it."""

    autocast = False

    def bf16_context(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)


def planned(config):
    return Plan("cpu", "fp32", "fp32", None, Plain(config, "fp32", "cpu"))


def build(config, plan=None, backward=torch.Tensor.backward, **options):
    plan = plan or planned(config)
    model = plan.backend.build(VOCAB)
    initialise(model, config.seed)
    return Gradients(plan, model, plan.backend.scaling(model), backward, **options)


def batch(sequences=8):
    return ids(sequences, length=POSITIONS + 1)


def step(of, autocast=False, seed=7):
    """Loss and gradients by name of one optimizer step on `batch()`."""

    of.plan.backend.autocast = autocast
    torch.manual_seed(seed)
    of.model.zero_grad(set_to_none=True)
    loss = of.of_step(batch(), MICRO)
    return loss, {name: p.grad for name, p in of.model.named_parameters()}


def assert_bit_equal(one, other):
    (loss, gradients), (other_loss, others) = one, other
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == others.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], others[name])] == []


def test_gradients_are_the_plain_steps():
    config = composed()
    of = build(config)
    model = GPT2(config.model, VOCAB, Composed(reference, recompute="none"))
    initialise(model, config.seed)
    loss = accumulate(batch(), config.micro_batch_size, loss_of(model), nullcontext, torch.Tensor.backward)
    assert_bit_equal(step(of), (loss, {name: p.grad for name, p in model.named_parameters()}))
    assert all(torch.count_nonzero(p.grad) for p in model.parameters())


# A step in bf16


def again(of, autocast=False):
    """Loss and gradients by name of `batch()`, computed again."""

    backend = of.plan.backend
    backend.autocast = autocast
    of.model.zero_grad(set_to_none=True)
    loss = of.of_step_in_bf16(batch(), MICRO)
    return loss, {name: p.grad for name, p in of.model.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_again_gives_the_gradients_of_the_reference_layers(autocast):
    of = build(composed("model.n_layer=2"))
    assert_bit_equal(again(of, autocast), step(of, autocast))


def test_the_twin_has_the_models_own_parameters_and_sees_what_becomes_of_them():
    of = build(composed())
    twin = twin_of(of.model)
    theirs = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in of.model.named_parameters(remove_duplicate=False):
        assert theirs[name] is parameter, name
    assert twin.head.weight is twin.tokens.weight
    again(of)
    with torch.no_grad():
        of.model.positions.weight.add_(1.0)
    assert_bit_equal(again(of), step(of))


@pytest.mark.whole
def test_a_recorded_step_that_computes_blocks_again_is_the_compiled_one_bit_for_bit():
    """On a CPU, where Inductor compiles the same and records nothing; tests/gpu has graphs."""
    found = []
    for is_recorded, choice in ((False, "none"), (True, "full")):
        plan = resolve(composed("compile=true", f"activation_checkpointing={choice}"), "cpu")
        plan.backend.recorded = is_recorded
        of, places = build(composed(), plan), []
        if is_recorded:
            of._backward = lambda loss, of=of, places=places: (
                places.append([p.grad.data_ptr() for p in of.model.parameters()]),
                loss.backward(),
            )
        found.append(step(of))
        torch.compiler.reset()
    assert len(places) == 2
    assert places[0] == places[1], "gradients are there before the first backward, and are added to"
    assert_bit_equal(*found)


# activation_checkpointing


@pytest.fixture
def passes(monkeypatch):
    """The attentions and hidden layers computed so far, each with whether gradients were on."""
    count = []

    def counted(part, forward):
        def counting(self, *inputs):
            count.append((part, torch.is_grad_enabled()))
            return forward(self, *inputs)

        return counting

    for part, name in ((reference.LayerNormMLP, "_forward"), (reference.Attention, "forward")):
        monkeypatch.setattr(part, name, counted(part.__name__, getattr(part, name)))
    return count


@pytest.mark.parametrize(("dropout", "autocast"), [(0.0, False), (0.3, True)])
@pytest.mark.parametrize(("choice", "attentions"), [("mlp", 4), ("full", 8)])
def test_recomputed_activations_change_no_bit(choice, attentions, dropout, autocast, passes):
    keys = ["model.n_layer=2", f"model.dropout={dropout}"]
    kept, random = step(build(composed(*keys)), autocast), torch.get_rng_state()
    assert Counter(passes) == {("LayerNormMLP", True): 4, ("Attention", True): 4}, "two blocks, two micro-batches"
    passes.clear()
    recomputed = step(build(composed(*keys, f"activation_checkpointing={choice}")), autocast)
    assert torch.equal(random, torch.get_rng_state())
    assert Counter(passes) == {("LayerNormMLP", True): 8, ("Attention", True): attentions}
    assert_bit_equal(kept, recomputed)
    if dropout:
        other = step(build(composed(*keys)), autocast, seed=8)
        assert not torch.equal(kept[0], other[0]), "dropout acts here"
