"""The emulated layers against the plain-torch ones, and one product against its three GEMMs written out."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.scaling import calibrate
from gpt2_fp8.layers.delayed_scaling import DelayedScaling
from gpt2_fp8.layers.emulated import Emulated, Emulation, Product
from gpt2_fp8.layers.fp8_cast import BLOCK, cast, uncast
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.model.loss import cross_entropy, split
from tests.common import CONFIG, VOCAB, ids
from tests.common import build as plain
from tests.model.options import MODERN

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DELAYED = DelayedScaling(history=4, margin=1, most_recent=False, forward=E4M3, gradient=E5M2)
recipes = pytest.mark.parametrize("recipe", ["delayed", "current", "block"])


def build(recipe="delayed", keep_bf16=(), recompute="none", config=CONFIG, gradient=E5M2, backward="fp8"):
    how = Emulation(recipe, E4M3, gradient, backward)
    delayed = replace(DELAYED, gradient=gradient) if recipe == "delayed" else None
    model = GPT2(config, VOCAB, Emulated(how, delayed, recompute), keep_bf16)
    initialise(model, seed=1)
    return model


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def loss_of(model, ids, first=None, scale=1.0):
    inputs, targets = split(ids)
    return cross_entropy(model.head(model.hidden_states(inputs, first), first), targets, VOCAB, False, scale)


def gradients(model, ids, first=None):
    """Loss and gradients by name; with delayed scaling, on scales that the same text has given."""
    if model.scales is not None and first is None:
        calibrate(model, lambda given: loss_of(model, given), ids, autocast)
    model.zero_grad(set_to_none=True)
    with autocast():
        loss = loss_of(model, ids, first)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def differ(ours, theirs):
    assert ours.keys() == theirs.keys()
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


def error(ours, theirs):
    away = sum((ours[name] - theirs[name]).square().sum() for name in theirs)
    return (away / sum(theirs[name].square().sum() for name in theirs)).sqrt().item()


@pytest.fixture(scope="module")
def bf16():
    return gradients(plain(), ids())


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("backward", ["fp8", "bf16", "bf16_wgrad"])
def test_a_product_is_its_three_gemms_written_out(recipe, backward):
    """With sums in float64. Blocks are 1 x 128 along the dimension that is summed, and 128 x 128 of a weight."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((160, 48), (64, 48), (160, 64)))
    leaves = [t.clone().requires_grad_() for t in (x, w, torch.ones(64))]
    y = Product(Emulation(recipe, E4M3, E5M2, backward), None, False, torch.float32)(*leaves)
    y.backward(g)

    def meant(operand):
        return operand.values.double() * (1 if operand.scale_inv is None else operand.scale_inv.double())

    along, across = (1, BLOCK), (BLOCK, 1)
    forward, weight = meant(cast(x, recipe, E4M3, *along)), meant(cast(w, recipe, E4M3, BLOCK, BLOCK))
    for_dgrad = meant(uncast(g) if backward == "bf16" else cast(g, recipe, E5M2, *along))
    for_wgrad = meant(cast(g, recipe, E5M2, *across) if backward == "fp8" else uncast(g))
    kept = {"fp8": meant(cast(x, recipe, E4M3, *across)), "bf16": forward, "bf16_wgrad": meant(uncast(x))}[backward]
    torch.testing.assert_close(y.double(), forward @ weight.T + 1, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(leaves[0].grad.double(), for_dgrad @ weight, rtol=2**-8, atol=1e-3)
    rounded = backward == "bf16_wgrad"
    torch.testing.assert_close(leaves[1].grad.double(), for_wgrad.T @ kept, rtol=2**-8 if rounded else 1e-5, atol=1e-4)
    torch.testing.assert_close(leaves[2].grad.double(), g.bfloat16().double().sum(0), rtol=2**-8, atol=1e-3)


OPTIONS = {
    "GPT-2's": {},
    "Llama's": {"norm": "rms_norm", "mlp": "swiglu", "mlp_width": 96, "positions": "rope", "bias": False,
                "tied_head": False, "n_kv_head": 1, "qk_norm": True},
    "of 2026": MODERN,
}  # fmt: skip


@recipes
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_is_as_close_to_bf16_as_fp8_is(recipe, options):
    config = replace(CONFIG, **OPTIONS[options])
    (loss, ours), (expected, theirs) = (gradients(m, ids()) for m in (build(recipe, config=config), plain(config)))
    assert loss == pytest.approx(expected, rel=2e-3)
    assert loss != expected
    assert 0.01 < error(ours, theirs) < 0.12  # as tests/gpu hold the other FP8 layers to


@recipes
def test_a_backward_in_bf16_is_nearer_and_so_are_gradients_in_e4m3(recipe, bf16):
    def away(**how):
        return error(gradients(build(recipe, **how), ids())[1], bf16[1])

    assert max(away(backward="bf16"), away(backward="bf16_wgrad"), away(gradient=E4M3)) < 0.9 * away()


def test_the_residual_stream_is_rounded_once():
    """The branch gets its gradient unrounded; the stream's own is rounded, and so is the sum."""
    block, generator = build().blocks[0], torch.Generator().manual_seed(0)
    x, y, g = (torch.randn(64, 32, generator=generator) for _ in range(3))
    x = x.bfloat16().float()
    x.requires_grad_(), y.requires_grad_()
    out = block.add(x, y)
    out.backward(g)
    assert torch.equal(out, (x + y).bfloat16().float())
    assert torch.equal(x.grad, g.bfloat16().float())
    assert torch.equal(y.grad, g)


@pytest.mark.parametrize("part", ["qkv", "projection", "fc1", "fc2"])
def test_a_kept_product_has_no_scales(part, bf16):
    others = [f"blocks.*.{other}" for other in ("qkv", "projection", "fc1", "fc2") if other != part]
    model = build(keep_bf16=[*others, "last"])
    loss, ours = gradients(model, ids())
    assert model.scales.scale.numel() == 3, "input, weight and gradient of one product"
    assert {"fc1": "blocks.0.mlp.fc1_weight", "fc2": "blocks.0.mlp.fc2_weight"}.get(
        part, f"blocks.0.{part}.weight"
    ) in differ(ours, bf16[1])
    assert loss == pytest.approx(bf16[0], rel=2e-3)
    assert build(keep_bf16=["first"]).scales.scale.numel() == 3 * 4, "of a block; the head has none"


@pytest.mark.parametrize("recompute", ["mlp", "full"])
@recipes
def test_recomputing_changes_no_bit(recipe, recompute):
    models = [build(recipe, recompute=r) for r in ("none", recompute)]
    (loss, theirs), (again, ours) = (gradients(model, ids()) for model in models)
    assert (loss, differ(ours, theirs)) == (again, set())
    kept, recomputed = map(state.capture, models)
    assert bool(kept) == (recipe == "delayed")
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept), "amaxes are those of one pass"


def test_a_state_dict_is_the_plain_layers():
    assert not differ(build().state_dict(), plain().state_dict())


# Delayed scaling


def test_scales_follow_the_amaxes_step_by_step():
    """Steps of two micro-batches, against the formula: the largest of the last four steps, and a margin of one."""
    model = build()
    scales = model.scales
    calibrate(model, lambda given: loss_of(model, given), ids(), autocast)
    history = scales.history[0].clone()[None]  # what the calibration has seen
    for step in range(6):
        rows = []
        for micro_batch in range(2):
            gradients(model, ids(seed=2 * step + micro_batch), first=micro_batch == 0)
            rows.append(scales.history[0].clone())
            assert torch.equal(scales.scale, scales.largest / history[:4].amax(0) / 2)
        assert torch.all(rows[1] >= rows[0])
        assert torch.all(rows[0] > 0)
        history = torch.cat([rows[1][None], history])
        with torch.no_grad():  # the weights change
            for p in model.parameters():
                p.mul_(1.1)


def test_amaxes_are_those_of_the_operands():
    model = build()
    seen = {}
    calibrate(model, lambda given: loss_of(model, given), ids(), autocast)
    block = model.blocks[0]
    block.attention.register_forward_hook(lambda _, __, out: seen.update(out=out.detach()))
    block.attention.register_full_backward_hook(lambda _, inputs, __: seen.update(packed=inputs[0]))
    gradients(model, ids(), first=True)
    row, column = model.scales.history[0], model.scales.column
    assert row[column(block.projection.product.places["input"])] == seen["out"].abs().max().float()
    assert row[column(block.projection.product.places["weight"])] == block.projection.weight.abs().max()
    assert row[column(block.qkv.product.places["gradient"])] == seen["packed"].abs().max().float()


def test_amaxes_that_are_no_numbers_and_those_of_a_model_that_has_moved():
    model = build()
    model.to(torch.float64)  # replaces the tensors
    row = model.scales.history[0]
    row.fill_(2.0)
    (model.scales.seen * torch.tensor([torch.nan, 1.0, 3.0] + [0.0] * (len(row) - 3))).sum().backward()
    assert row.tolist()[:4] == [2, 2, 3, 2]
    assert model.scales.seen.grad is None


def test_a_restored_model_goes_on_and_one_without_gradients_records_nothing():
    model, fresh = build(), build()
    gradients(model, ids())
    before = state.capture(model)
    with autocast(), torch.no_grad():
        loss_of(model.eval(), ids(seed=3))
    assert not differ(before, state.capture(model.train()))
    state.restore(fresh, before)
    (loss, theirs), (again, ours) = (gradients(m, ids(seed=5), first=True) for m in (model, fresh))
    assert (loss, differ(ours, theirs)) == (again, set())
    assert not differ(state.capture(model), state.capture(fresh))


def test_a_copy_records_amaxes_of_its_own():
    model = build()
    gradients(model, ids())
    copy, before = deepcopy(model), state.capture(model)
    (loss, ours), scales = gradients(copy, ids(seed=5), first=True), state.capture(copy)
    assert not differ(before, state.capture(model))
    (again, theirs) = gradients(model, ids(seed=5), first=True)
    assert (loss, differ(ours, theirs), differ(scales, state.capture(model))) == (again, set(), set())


def test_an_outlier_leaves_loss_and_gradients_finite():
    model = build()
    calibrate(model, lambda given: loss_of(model, given), ids(), autocast)
    with torch.no_grad():
        model.blocks[0].mlp.fc1_weight[0, 0] = 1e30
    loss, ours = gradients(model, ids(), first=True)
    assert all(torch.isfinite(gradient).all() for gradient in ours.values())
    assert loss < 10
