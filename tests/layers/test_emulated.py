"""The emulated layers against the plain-torch ones: each switch changes its operand alone, and none changes nothing."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.config.precision_schema import EMULATED
from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.kernels.rounding import mean_of_rounded
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import DelayedScaling
from gpt2_fp8.layers.emulated import Emulated
from gpt2_fp8.layers.emulated_gemm import NO_SLOTS, Emulation, cast_forward, linear, product, weight_gradient
from gpt2_fp8.layers.emulated_head import Head
from gpt2_fp8.layers.emulated_probabilities import UNIT
from gpt2_fp8.layers.fp8_cast import BLOCK, Cast, cast, saturated, scale_of, uncast
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.model.loss import cross_entropy, split
from gpt2_fp8.precision import state
from gpt2_fp8.precision.calibrate import calibrate
from tests.common import CONFIG, VOCAB, ids

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPERANDS = EMULATED[:5]
RECIPES = ["delayed", "current", "block"]
DELAYED = DelayedScaling(history=4, margin=1, most_recent=False, forward=E4M3, gradient=E5M2)
recipes = pytest.mark.parametrize("recipe", RECIPES)


def build(
    switches=EMULATED, recipe="delayed", keep_bf16=(), recompute="none", config=CONFIG, gradient=E5M2, backward="fp8"
):
    emulation = Emulation(recipe, E4M3, gradient, frozenset(switches), backward)
    delayed = replace(DELAYED, gradient=gradient) if recipe == "delayed" else None
    return initialised(GPT2(config, VOCAB, Emulated(emulation, delayed, recompute), keep_bf16))


def plain(config=CONFIG):
    return initialised(GPT2(config, VOCAB, Composed(reference, recompute="none")))


def initialised(model):
    initialise(model, seed=1)
    return model


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def loss_of(model, ids, first=None, scale=1.0):
    """As `backends.base.Backend.loss`."""
    inputs, targets = split(ids)
    x = model.hidden_states(inputs, first)
    if chunked := getattr(model.head, "loss", None):
        return chunked(x, targets, VOCAB, scale, first)
    return cross_entropy(model.head(x, first), targets, VOCAB, False, scale)


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


def weights(gradient):
    """The names of the blocks' GEMMs' weights."""
    return {name for name in gradient if name.endswith("weight") and "norm" not in name and "blocks" in name}


@pytest.fixture(scope="module")
def bf16():
    return gradients(plain(), ids())


# Switches


@recipes
def test_with_nothing_emulated_every_bit_is_the_plain_layers(bf16, recipe):
    loss, ours = gradients(build([], recipe), ids())
    assert (loss, differ(ours, bf16[1])) == (bf16[0], set())


def test_the_same_without_biases():
    config = replace(CONFIG, bias=False)
    (loss, theirs), (again, ours) = gradients(plain(config), ids()), gradients(build([], config=config), ids())
    assert (loss, differ(ours, theirs)) == (again, set())


@recipes
@pytest.mark.parametrize("switch", ["wgrad_gradient", "wgrad_input"])
def test_operands_of_wgrad_change_the_weights_gradients_alone(bf16, recipe, switch):
    loss, ours = gradients(build([switch], recipe), ids())
    assert loss == bf16[0]
    assert differ(ours, bf16[1]) == weights(ours)
    assert 0.002 < error(ours, bf16[1]) < 0.1


@recipes
def test_the_operand_of_dgrad_changes_no_loss_and_nothing_above_it(bf16, recipe):
    loss, ours = gradients(build(["dgrad_gradient"], recipe), ids())
    above = {f"blocks.1.mlp.{name}" for name in ("fc2_weight", "fc2_bias")}
    above |= {"head.layer_norm_weight", "head.layer_norm_bias"}
    assert loss == bf16[0]
    assert differ(ours, bf16[1]) == ours.keys() - above
    assert 0.002 < error(ours, bf16[1]) < 0.1


@recipes
@pytest.mark.parametrize("switch", ["fprop_input", "weight", "head"])
def test_operands_of_fprop_change_the_loss(bf16, recipe, switch):
    loss, ours = gradients(build([switch], recipe), ids())
    assert loss != bf16[0]
    assert loss == pytest.approx(bf16[0], rel=2e-3)
    assert 0.002 < error(ours, bf16[1]) < 0.1


def test_the_residual_stream_is_rounded_once():
    """The branch gets its gradient unrounded; the stream's own is rounded, and so is the sum."""
    block, generator = build(["residual"]).blocks[0], torch.Generator().manual_seed(0)
    x, y, g = (torch.randn(64, 32, generator=generator) for _ in range(3))
    x = x.bfloat16().float()
    x.requires_grad_(), y.requires_grad_()
    out = block.add(x, y)
    out.backward(g)
    assert torch.equal(out, (x + y).bfloat16().float())
    assert not torch.equal(out, (x + y.bfloat16()).bfloat16().float()), "rounded twice it differs"
    assert torch.equal(x.grad, g.bfloat16().float())
    assert torch.equal(y.grad, g)


def test_the_gradient_of_the_residual_stream_is_quantized_before_it_is_rounded(bf16):
    seen = {}
    for residual in (True, False):
        model = build(["dgrad_gradient", "residual"] if residual else ["dgrad_gradient"], recipe="current")
        model.blocks[0].mlp.register_full_backward_hook(lambda _, __, out, key=residual: seen.update({key: out[0]}))
        _, ours = gradients(model, ids())
        assert differ(ours, bf16[1])
    assert seen[False].dtype == torch.bfloat16
    assert seen[True].dtype == torch.float32
    assert not torch.equal(seen[True], seen[True].bfloat16().float())


OPERAND_CASTS = [
    # switch, of which GEMM (0: fprop, 1: dgrad, 2: wgrad), the shape of its blocks
    ("fprop_input", {0}, (1, BLOCK)),
    ("weight", {0, 1}, (BLOCK, BLOCK)),
    ("dgrad_gradient", {1}, (1, BLOCK)),
    ("wgrad_gradient", {2}, (BLOCK, 1)),
    ("wgrad_input", {2}, (BLOCK, 1)),
]


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize(("switch", "gemms", "blocks"), OPERAND_CASTS, ids=[case[0] for case in OPERAND_CASTS])
def test_each_switch_casts_its_operand_in_its_gemms(recipe, switch, gemms, blocks):
    """One layer against the three GEMMs written out, with float64 sums."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((160, 48), (64, 48), (160, 64)))
    dtype = E5M2 if "gradient" in switch else E4M3
    emulation = Emulation(recipe, E4M3, E5M2, frozenset([switch]))
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w, None, emulation.casts(), NO_SLOTS, rounded=False)
    y.backward(g)

    given = {"input": x.detach(), "weight": w.detach(), "gradient": g}
    of = next(name for name in given if switch.endswith(name))
    quantized = cast(given[of], Cast(recipe, dtype, *blocks))
    values = quantized.values.double() * (1.0 if quantized.scale_inv is None else quantized.scale_inv.double())

    def operand(name, gemm):
        return values if name == of and gemm in gemms else given[name].bfloat16().double()

    expected = (
        operand("input", 0) @ operand("weight", 0).T,
        operand("gradient", 1) @ operand("weight", 1),
        operand("gradient", 2).T @ operand("input", 2),
    )
    for gemm, (ours, theirs) in enumerate(zip((y, x.grad, w.grad), expected, strict=True)):
        # dgrad is rounded to bfloat16, and so is a GEMM without FP8 other than fprop
        rounded = gemm == 1 or (gemm == 2 and gemm not in gemms)
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8 if rounded else 1e-5, atol=1e-4)
        without = given["input"].bfloat16().double() @ given["weight"].bfloat16().double().T
        if gemm == 0:
            assert torch.allclose(ours.double(), without, rtol=1e-5, atol=1e-4) == (gemm not in gemms)


@recipes
def test_everything_together_is_as_close_as_fp8_is(bf16, recipe):
    loss, ours = gradients(build(recipe=recipe), ids())
    assert loss == pytest.approx(bf16[0], rel=2e-3)
    assert 0.02 < error(ours, bf16[1]) < 0.12  # as tests/gpu hold the other FP8 layers to


def test_e4m3_gradients_are_more_precise(bf16):
    both = [error(gradients(build(gradient=dtype), ids())[1], bf16[1]) for dtype in (E4M3, E5M2)]
    assert both[0] < 0.9 * both[1]


# What it composes with


def test_kept_parts_are_the_plain_layers(bf16):
    model = build(set(EMULATED) - {"residual"}, keep_bf16=["first", "last", "head"])
    loss, ours = gradients(model, ids())
    assert (loss, differ(ours, bf16[1])) == (bf16[0], set())
    assert model.scales.scale.numel() == 0
    assert build(keep_bf16=["first"]).scales.scale.numel() == 3 * 4 + 2  # four GEMMs of a block, and the head's two


ONE_AT_A_TIME = ["qkv", "projection", "fc1", "fc2"]


@recipes
@pytest.mark.parametrize("part", ONE_AT_A_TIME)
def test_a_kept_product_is_the_plain_layers(part, recipe, bf16):
    """With one product in FP8, all others kept: its weight's gradient differs, and losses are near bf16's."""
    others = [f"blocks.*.{other}" for other in ONE_AT_A_TIME if other != part]
    model = build(set(EMULATED) - {"residual", "head"}, recipe, [*others, "head", "last"])
    loss, ours = gradients(model, ids())
    name = {"fc1": "mlp.fc1_weight", "fc2": "mlp.fc2_weight"}.get(part, f"{part}.weight")
    assert f"blocks.0.{name}" in differ(ours, bf16[1])
    assert loss != bf16[0]
    assert loss == pytest.approx(bf16[0], rel=2e-3)
    if model.scales is not None:
        assert model.scales.scale.numel() == 3, "input, weight and gradient of one product"


@pytest.mark.parametrize("kept", ["blocks.*", "blocks.*.*", "first:9"])
def test_keeping_every_part_is_keeping_the_blocks(kept, bf16):
    kept = f"first:{CONFIG.n_layer}" if kept == "first:9" else kept
    model = build(set(EMULATED) - {"residual", "head"}, keep_bf16=[kept])
    loss, ours = gradients(model, ids())
    assert (loss, differ(ours, bf16[1])) == (bf16[0], set())


# The backward in bf16


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_what_a_backward_in_bf16_multiplies(recipe):
    """bf16: the gradient uncast, and the forward's FP8 operands. bf16_wgrad: both operands of wgrad uncast."""
    torch.manual_seed(0)
    x, weight, g = (torch.randn(shape).bfloat16().float() for shape in ((64, 32), (48, 32), (64, 48)))
    results = {}
    for backward in ("fp8", "bf16", "bf16_wgrad"):
        casts = Emulation(recipe, E4M3, E5M2, frozenset(EMULATED), backward).casts()
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = linear(leaves[0], leaves[1], None, casts, NO_SLOTS, rounded=True)
        y.backward(g)
        results[backward] = y.detach(), *(leaf.grad for leaf in leaves)
    assert all(torch.equal(result[0], results["fp8"][0]) for result in results.values()), "the forward stays in FP8"
    meant = [meaning(cast(t, Cast(recipe, E4M3, *shape))) for t, shape in ((x, (1, BLOCK)), (weight, (BLOCK, BLOCK)))]
    assert torch.allclose(results["bf16"][1], g @ meant[1], rtol=2**-8, atol=1e-3)
    assert torch.allclose(results["bf16"][2], g.t() @ meant[0], rtol=1e-5, atol=1e-4)
    assert torch.equal(results["bf16_wgrad"][1], results["fp8"][1])
    assert torch.equal(results["bf16_wgrad"][2], (g.bfloat16().t() @ x.bfloat16()).float())
    assert not torch.allclose(results["fp8"][2], results["bf16"][2], rtol=1e-3, atol=1e-3)


def meaning(operand):
    """The numbers that an operand stands for, float32."""
    return operand.values.float() * (1 if operand.scale_inv is None else operand.scale_inv)


@recipes
def test_a_backward_in_bf16_is_nearer(recipe, bf16):
    errors = {}
    for backward in ("fp8", "bf16_wgrad", "bf16"):
        loss, ours = gradients(build(recipe=recipe, backward=backward), ids())
        assert loss == pytest.approx(bf16[0], rel=2e-3)
        errors[backward] = error(ours, bf16[1])
    assert max(errors["bf16"], errors["bf16_wgrad"]) < 0.9 * errors["fp8"]


@pytest.mark.parametrize("recompute", ["mlp", "full"])
@recipes
def test_recomputing_changes_no_bit(recipe, recompute):
    models = [build(recipe=recipe, recompute=r) for r in ("none", recompute)]
    (loss, theirs), (again, ours) = (gradients(model, ids()) for model in models)
    assert (loss, differ(ours, theirs)) == (again, set())
    kept, recomputed = map(state.capture, models)
    assert bool(kept) == (recipe == "delayed")
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept), "amaxes are those of one pass"


def test_dropout_drops():
    model = build(config=replace(CONFIG, dropout=0.5))
    losses = {gradients(model, ids())[0] for _ in range(3)}
    model.eval()
    with autocast(), torch.no_grad():
        assert loss_of(model, ids()) == loss_of(model, ids())
    assert len(losses) == 3


def test_a_state_dict_moves_to_the_plain_layers_and_back():
    model, other = build(), plain()
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == {
        name: tuple(t.shape) for name, t in other.state_dict().items()
    }
    assert not differ(model.state_dict(), other.state_dict())
    initialise(other, seed=2)
    model.load_state_dict(other.state_dict())
    assert not differ(model.state_dict(), other.state_dict())


def test_logits_are_those_of_the_loss():
    model = build().eval()
    inputs, targets = split(ids())
    with autocast(), torch.no_grad():
        logits, loss = model(inputs), loss_of(model, ids())
    assert logits.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(cross_entropy(logits, targets, VOCAB, False).item(), rel=1e-6)


# The head

OPERANDS_OF_HEAD = [[f"head_{name}"] for name in OPERANDS]


def exactly_stored(logits, targets):
    """The numbers of a gradient in E5M2, its rows' factors, all of it, and what the numbers lack; float64 of logits.

    Every id is frequent here, so the references are the sums of exponentials of logits that are rounded to bfloat16,
    less what that may have added.
    """
    counted, at = (targets >= 0)[:, None], targets.clamp_min(0)[:, None]
    log_sums = logits.logsumexp(1, keepdim=True)
    few = logits.bfloat16().double()
    references = few.logsumexp(1, keepdim=True) - few.amax(1, keepdim=True).abs() / 256
    references = references.maximum(logits.gather(1, at))
    factors = torch.exp(references - log_sums) * counted
    u = saturated(torch.exp(logits - references) * UNIT, E5M2).double() / (UNIT * mean_of_rounded(E5M2))
    p = (logits.softmax(1) - F.one_hot(at[:, 0], logits.shape[1])) * counted
    return u, factors, p, ((p - u * factors) * counted).gather(1, at)[:, 0]


@pytest.mark.parametrize(
    "switches", [["head"], *OPERANDS_OF_HEAD, ["head_dgrad_gradient", "head_wgrad_gradient"]], ids="+".join
)
def test_the_head_casts_what_its_switches_name(switches):
    """Loss and gradients against the three GEMMs written out; padded columns and ignored targets have none."""
    given = ids()
    given[0, 3:9] = -1
    model = build([*switches, "residual"], recipe="current")
    assert isinstance(model.head, Head)
    with autocast():
        inputs, targets = split(given)
        x = model.hidden_states(inputs).detach()
        loss = model.head.loss(x, targets, VOCAB, 0.5, None)
        loss.backward()
    head, rows = model.head, x.flatten(0, 1)
    norm = head.layer_norm_weight.detach().requires_grad_()
    y = F.layer_norm(rows.float(), rows.shape[-1:], norm, head.layer_norm_bias)

    def operand(name, values, as_fp8):
        return as_fp8(values) if {"head", f"head_{name}"} & set(switches) else values.bfloat16().double()

    def current(values):
        it = cast(values, Cast("current", E4M3, 1, 1))
        return it.values.double() * it.scale_inv.double()

    w = operand("weight", head.weight.detach(), current)
    logits = operand("fprop_input", y.detach(), current) @ w.T
    is_cast = {name: bool({"head", f"head_{name}"} & set(switches)) for name in ("dgrad_gradient", "wgrad_gradient")}
    if not any(is_cast.values()):
        logits = logits.bfloat16().double()
    at = targets.flatten()
    counted = at >= 0
    expected = F.cross_entropy(logits[counted, :VOCAB], at[counted])
    u, factors, p, rest = exactly_stored(logits[:, :VOCAB], at)
    part = 0.5 / counted.sum()
    padding = (0, len(w) - VOCAB)
    u, p = F.pad(u, padding) * part, F.pad(p, padding).float() * part
    rest, at = rest[:, None] * part, at.clamp_min(0)
    given_input = operand("wgrad_input", y.detach(), current)
    dy, dw = p.bfloat16().double() @ w, p.bfloat16().double().T @ given_input
    if is_cast["dgrad_gradient"]:
        dy = (u @ w).bfloat16().double() * factors + rest * w[at]
    if is_cast["wgrad_gradient"]:
        dw = u.T @ operand("wgrad_input", y.detach() * factors, current)
        dw.index_add_(0, at, rest * given_input)
    y.backward(dy.bfloat16().float())
    assert loss.item() == pytest.approx(0.5 * expected.item(), rel=1e-6)
    for ours, theirs in ((head.weight.grad, dw), (head.layer_norm_weight.grad, norm.grad)):
        # An operand in FP8 makes 5e-3 of one, or changes the loss.
        assert ((ours - theirs).norm() / theirs.norm()).item() < 2e-3
    assert torch.count_nonzero(head.weight.grad[VOCAB:]) == 0


@pytest.mark.parametrize("penalty", [None, PenaltyConfig(z_loss=0.02, logit_l2=0.1)], ids=["alone", "penalties"])
@pytest.mark.parametrize("switches", [["head_weight"], ["head_fprop_input", "head_weight", "head_wgrad_input"]])
def test_a_gradient_that_is_not_cast_is_of_logits_in_bfloat16_to_the_last_bit(switches, penalty):
    given = ids()
    given[1, 4:] = -1
    model = build(switches, recipe="current")
    with autocast():
        inputs, targets = split(given)
        x = model.hidden_states(inputs).detach()
        loss = model.head.loss(x, targets, VOCAB, 0.5, None, penalty)
    (loss if penalty is None else loss[0]).backward()
    head, targets = model.head, targets.flatten()
    with torch.no_grad():
        y = head._normalise(x).flatten(0, 1)
        operands, w, _ = cast_forward(y, head.weight, head.casts, None)
        logits = product(operands.fprop, w.t()).bfloat16()
        real = logits[:, :VOCAB].float()
        part = 0.5 / torch.count_nonzero(targets >= 0)
        p = torch.softmax(real, 1)
        if penalty is not None:
            p = p * (1 + 2.0 * 0.02 * real.logsumexp(1, keepdim=True)) + 2.0 * 0.1 / VOCAB * real
        p = p - F.one_hot(targets.clamp_min(0), VOCAB)
        g = F.pad(p * (targets >= 0)[:, None], (0, logits.shape[1] - VOCAB)) * part
        dw = weight_gradient(uncast(g), operands.wgrad)
    alone = loss if penalty is None else loss[1]
    assert torch.equal(alone, F.cross_entropy(real, targets, ignore_index=-1, reduction="sum") * part)
    assert torch.equal(head.weight.grad, dw)


def test_a_loss_without_gradients_is_of_logits_in_bfloat16():
    """As those of an evaluation are in the fused head; in training they are not rounded."""
    model = build(recipe="current")
    with autocast():
        inputs, targets = split(ids())
        x = model.hidden_states(inputs).detach()
        trained = model.head.loss(x, targets, VOCAB, 1.0, None)
        with torch.no_grad():
            alone = model.head.loss(x, targets, VOCAB, 1.0, None)
            y = model.head._normalise(x).flatten(0, 1)
    operands, w, _ = cast_forward(y, model.head.weight.detach(), model.head.casts, None)
    logits = product(operands.fprop, w.t())
    assert torch.equal(trained.detach(), F.cross_entropy(logits[:, :VOCAB], targets.flatten(), reduction="sum") / 128)
    rounded = logits[:, :VOCAB].bfloat16().float()
    assert torch.equal(alone, F.cross_entropy(rounded, targets.flatten(), reduction="sum") / 128)
    assert alone != trained


def test_factors_are_in_the_inputs_of_wgrad_and_not_in_their_amax(monkeypatch):
    """Delayed scaling's scale is that of the input without them."""
    seen = []

    def noted(x, how, scale=None):
        seen.append((x, scale))
        return cast(x, how, scale)

    model = build()
    calibrate(model, lambda given: loss_of(model, given), ids(), autocast)
    monkeypatch.setattr("gpt2_fp8.layers.emulated_head.cast", noted)
    monkeypatch.setattr("gpt2_fp8.kernels.probability_grid.IDS", 16)
    with autocast():
        inputs, targets = split(ids())
        x = model.hidden_states(inputs, True).detach()
        model.head.loss(x, targets, VOCAB, 1.0, True).backward()
        y = model.head._normalise(x).flatten(0, 1).detach()
    ((given, scale),) = seen
    factors = (given / y).median(1).values
    assert torch.all((factors > 0.01) & (factors < 0.5)), "16 of 257 ids have little of a first softmax"
    torch.testing.assert_close(given, y * factors[:, None])
    place = model.scales.column(model.head.places["input"])
    assert scale == model.scales.scale[place]
    assert model.scales.history[0, place] == y.abs().max()


# Scales


def test_scales_follow_the_amaxes_step_by_step():
    """Steps of two micro-batches, against the formula: the largest of the last four steps, and a margin of one."""
    model, amaxes = build(), {}
    scales = model.scales
    calibrate(model, lambda given: loss_of(model, given), ids(), autocast)
    history = scales.history[0].clone()[None]  # what the calibration has seen
    for step in range(6):
        rows = []
        for micro_batch in range(2):
            gradients(model, ids(seed=2 * step + micro_batch), first=micro_batch == 0)
            rows.append(scales.history[0].clone())
            if micro_batch == 0:
                expected = scales.largest / history[:4].amax(0) / 2
                assert torch.equal(scales.scale, expected)
                used = scales.scale.clone()
        assert torch.equal(scales.scale, used), "the same in all micro-batches"
        assert torch.all(rows[1] >= rows[0])
        amaxes[step] = rows[1]
        history = torch.cat([rows[1][None], history])
        with torch.no_grad():  # the weights change
            for p in model.parameters():
                p.mul_(1.1)
    assert all(torch.all(row > 0) for row in amaxes.values())


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
    assert row[column(model.head.places["weight"])] == model.head.weight.abs().max()


def test_a_forward_without_gradients_records_nothing():
    model = build()
    calibrate(model, lambda given: loss_of(model, given), ids(), autocast)
    before = state.capture(model)
    model.eval()
    with autocast(), torch.no_grad():
        loss_of(model, ids(seed=3))
    after = state.capture(model)
    assert before.keys() == {f"scales.scaling_{d}.{k}" for d in ("fwd", "bwd") for k in ("scale", "amax_history")}
    assert not differ(before, after)


def test_not_a_number_is_no_amax():
    model = build()
    row = model.scales.history[0]
    row.fill_(2.0)
    (model.scales.seen * torch.tensor([torch.nan, 1.0, 3.0] + [0.0] * (len(row) - 3))).sum().backward()
    assert row.tolist()[:4] == [2, 2, 3, 2]
    assert model.scales.seen.grad is None


def test_amaxes_are_recorded_where_the_model_has_moved_to():
    model = build()
    model.to(torch.float64)  # replaces the tensors
    (model.scales.seen * 5).sum().backward()
    assert torch.all(model.scales.history[0] == 5)


def test_a_restored_model_goes_on_as_the_one_that_was_saved():
    model, fresh = build(), build()
    gradients(model, ids())
    state.restore(fresh, state.capture(model))
    (loss, theirs), (again, ours) = (gradients(m, ids(seed=5), first=True) for m in (model, fresh))
    assert (loss, differ(ours, theirs)) == (again, set())
    assert not differ(state.capture(model), state.capture(fresh))


def test_an_absurd_operand_is_finite():
    """A cast saturates. Its amax counts for the next steps, as everywhere."""
    model = build()
    calibrate(model, lambda given: loss_of(model, given), ids(), autocast)
    with torch.no_grad():
        model.blocks[0].mlp.fc1_weight[0, 0] = 1e30
    loss, ours = gradients(model, ids(), first=True)
    assert all(torch.isfinite(gradient).all() for gradient in ours.values())
    assert loss < 10
    assert scale_of(model.scales.history[0].max(), E4M3) < 1e-27
