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
from gpt2_fp8.fp8.scaling import PASSES
from gpt2_fp8.fp8.state import capture
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import Place
from gpt2_fp8.model.gpt2 import GPT2, initialise
from tests.common import VOCAB, ids, loss_of
from tests.faults.pretended import pretended
from tests.fp8.test_state import Layer
from tests.layers.test_delayed_scaling import scales
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


def build(config, plan=None, backward=torch.Tensor.backward, **options):
    plan = plan or Plan("cpu", "fp32", "fp32", None, Plain(config, "fp32", "cpu"))
    model = plan.backend.build(VOCAB)
    initialise(model, config.seed)
    return Gradients(plan, model, plan.backend.scaling(model), backward, **options)


def batch(sequences=8):
    return ids(sequences, length=POSITIONS + 1)


def step(of, autocast=False, seed=7):
    of.plan.backend.autocast = autocast
    torch.manual_seed(seed)
    of.model.zero_grad(set_to_none=True)
    return of.of_step(batch(), MICRO), {name: p.grad for name, p in of.model.named_parameters()}


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


def test_calibration_takes_one_micro_batch_and_leaves_no_gradient(monkeypatch):
    of, seen = with_scales(), []
    loss = of.loss
    monkeypatch.setattr(of, "loss", lambda ids, *rest: seen.append(len(ids)) or loss(ids, *rest))
    of.calibrate(batch(), MICRO)
    assert seen == [4] * PASSES
    assert all(p.grad is None for p in of.model.parameters())


# A step that has to begin again


def with_scales():
    """An engine whose model keeps delayed scaling's state in both ways, and sees the magnitudes of a block's output and
    its gradient: once a step, as the fused layers, and after every forward, as Transformer Engine's."""
    config = composed()
    of = build(config, pretended(config))
    of.forward_context = nullcontext
    of.loss = loss_of(of.model)
    of.model.scales, of.model.layer = scales(forward=1, gradient=1), Layer()
    of.model.layer.init_fp8_metadata(1)
    of.model.blocks[0].register_forward_hook(lambda _, __, out: _see(of.model, out))
    return of


def _see(model, out):
    if not out.requires_grad:
        return
    _raise(model.scales.slot(Place("forward", 0)).amax, out)
    out.register_hook(lambda gradient: _raise(model.scales.slot(Place("gradient", 0)).amax, gradient))
    own = model.layer.fp8_meta["scaling_fwd"]
    own.amax_history[0] = out.detach().abs().max()
    own.scale.copy_(448 / own.amax_history.amax(0))
    own.amax_history.copy_(own.amax_history.roll(-1, 0))
    own.amax_history[0] = 0


def _raise(amax, tensor):
    amax.copy_(torch.maximum(amax, tensor.detach().abs().max()))


def test_a_calibration_that_begins_again_finds_the_same_scales():
    found = []
    for stray in (1.0, 64.0):
        of = with_scales()
        of.model.scales.scale.fill_(stray)
        of.model.scales.history.fill_(stray)
        of.calibrate(batch(), MICRO)
        found.append(capture(of.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# A step in bf16


def again(of, autocast=False):
    backend = of.plan.backend
    backend.autocast = autocast
    of.model.zero_grad(set_to_none=True)
    return of.of_step_in_bf16(batch(), MICRO), {name: p.grad for name, p in of.model.named_parameters()}


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
def test_a_recorded_step_is_the_compiled_one_bit_for_bit_with_blocks_computed_again_or_not():
    """On a CPU, where Inductor compiles the same and records nothing; tests/gpu has graphs."""
    found = []
    for choice, is_recorded in (("none", False), ("full", False), ("full", True)):
        plan = resolve(composed("compile=true", f"activation_checkpointing={choice}"), "cpu")
        plan.backend.recorded = is_recorded
        of = build(composed(), plan)
        places = []
        if is_recorded:
            of._backward = lambda loss, of=of, places=places: (
                places.append([p.grad.data_ptr() for p in of.model.parameters()]),
                loss.backward(),
            )
        found.append(step(of))
        torch.compiler.reset()
    assert len(places) == 2
    assert places[0] == places[1], "gradients are there before the first backward, and are added to"
    assert_bit_equal(found[0], found[1])
    assert_bit_equal(found[1], found[2])


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
    kept = step(build(composed(*keys)), autocast)
    assert Counter(passes) == {("LayerNormMLP", True): 4, ("Attention", True): 4}, "two blocks, two micro-batches"
    passes.clear()
    recomputed = step(build(composed(*keys, f"activation_checkpointing={choice}")), autocast)
    assert Counter(passes) == {("LayerNormMLP", True): 8, ("Attention", True): attentions}
    assert_bit_equal(kept, recomputed)
    if dropout:
        other = step(build(composed(*keys)), autocast, seed=8)
        assert not torch.equal(kept[0], other[0]), "dropout acts here"


def test_recomputing_leaves_the_random_numbers_where_they_are():
    states = []
    for choice in ("none", "mlp", "full"):
        step(build(composed("model.dropout=0.3", f"activation_checkpointing={choice}")))
        states.append(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states)


def test_a_block_that_is_computed_again_keeps_its_input_alone():
    """The bytes that autograd keeps for the backward, parameters left out: `none` keeps all, `full` a block's input."""
    held = {}
    for choice in ("none", "mlp", "full"):
        of = build(composed("model.n_layer=2", f"activation_checkpointing={choice}"))
        known, kept = {p.data_ptr() for p in of.model.parameters()}, {}

        def keep(tensor, known=known, kept=kept):
            if tensor.untyped_storage().data_ptr() not in known:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        x = torch.randn(4, POSITIONS, of.model.config.n_embd, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = of.model.blocks[1](of.model.blocks[0](x, None), None)
        assert out.requires_grad
        held[choice] = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert held["full"] == 2 * x.untyped_storage().nbytes(), "the inputs of two blocks"
    assert held["full"] < held["mlp"] < held["none"]
