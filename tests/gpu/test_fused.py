"""The fused layers: every shape and setting that they take against bf16, accumulation, evaluation, and their state."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.fp8 import state
from gpt2_fp8.model.loss import split
from tests.gpu import common
from tests.gpu.common import CONFIG, VOCAB, build, calibrated, error, evaluating, gradients, hopper, tokens

pytestmark = [pytest.mark.fp8, hopper]

HEAD = "gpt2_fp8.layers.head"  # imported by the tests alone: it needs Triton


def against_bf16(ids, keep_bf16=(), config=CONFIG, precision="fp8_hybrid", recompute="none"):
    """The fused model after it was held to bf16's loss and gradients on `ids`, and its plugin."""
    settings = {"precision": precision, "keep_bf16": keep_bf16, "recompute": recompute}
    model, fp8, ours, expected = common.assert_like_bf16("fused", ids, config, **settings)
    for name, gradient in expected.items():  # a part that is wrong would drown in the norm of all
        if name.endswith("weight"):
            assert error({name: ours[name]}, {name: gradient}) < 0.4, name
    return model, fp8


def of_ours(layer):
    """Whether a block or head is a fused one."""
    return type(layer).__module__ in ("gpt2_fp8.layers.fused", HEAD)


# Against bf16


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        (replace(CONFIG, bias=False), 16),
        (replace(CONFIG, n_embd=320, n_head=5), 8),  # no multiple of 128
        (replace(CONFIG, n_embd=272, n_head=17), 4),  # no multiple of 64; heads of 16
        (replace(CONFIG, n_head=8), 4),  # heads of 32
        (replace(CONFIG, n_head=2, n_layer=2), 4),  # heads of 128
        (replace(CONFIG, n_positions=48), 3),  # 144 rows: no multiple of a tile
        (replace(CONFIG, n_positions=16, n_layer=1), 1),  # the smallest products that there are
    ],
    ids=["no bias", "width 320", "width 272", "heads of 32", "heads of 128", "3 x 48 tokens", "16 tokens"],
)
def test_every_shape_is_close_to_bf16(config, batch):
    against_bf16(tokens(batch, n_positions=config.n_positions), config=config)


@pytest.mark.parametrize(
    "keep_bf16", [["first"], ["last"], ["head"], ["blocks.1"], ["first", "last", "head"]], ids=",".join
)
def test_kept_parts_are_transformer_engines_in_bf16(keep_bf16):
    model, _ = against_bf16(tokens(4), keep_bf16)
    fused = [of_ours(block) for block in model.blocks]
    kept = {"first": 0, "blocks.1": 1, "last": 2}
    assert fused == [i not in {kept[name] for name in keep_bf16 if name != "head"} for i in range(3)]
    assert of_ours(model.head) == ("head" not in keep_bf16)
    saved = state.capture(model)
    assert {name.partition(".")[0] for name in saved} == {"scales"}
    assert len(saved["scales.scaling_fwd.scale"]) == 8 * sum(fused) + 2 * ("head" not in keep_bf16)
    assert len(saved["scales.scaling_bwd.scale"]) == 4 * sum(fused)


def test_one_long_sequence():
    """Its targets begin 8 bytes into its ids; a batch of more is copied."""
    config = replace(CONFIG, n_layer=1, n_positions=16384)
    against_bf16(tokens(1, n_positions=16384), config=config)


def test_the_tables_hooks_see_its_whole_gradient_once():
    """It is the embedding's and the head's; both write it themselves."""
    model, fp8 = calibrated("fused", ids=tokens(4))
    table, seen = model.tokens.weight, []
    table.register_post_accumulate_grad_hook(lambda it: seen.append(it.grad.clone()))
    gradients(model, tokens(4), True, fp8.forward_context)
    assert [torch.equal(gradient, table.grad) for gradient in seen] == [True]


def test_ignored_targets_take_no_part():
    ids = tokens(4)
    ids[0, 100:] = -1
    ids[1] = -1
    ids[2, 1:17] = -1
    against_bf16(ids)


# The same numbers by other ways


@pytest.mark.parametrize("chunk", [512, 1536])
def test_chunks_of_the_head_change_nothing(monkeypatch, chunk):
    """1,024 rows fit one chunk; 512 makes two; with 2,560 rows 1,536 makes two, the last one smaller."""
    ids = tokens(4 if chunk == 512 else 10)
    ids[1, 30:] = -1  # the mean is over all of a micro-batch's targets and not over a chunk's
    model, fp8 = calibrated("fused", ids=ids)
    with state.restored(model):
        loss, expected = gradients(model, ids, True, fp8.forward_context)
    monkeypatch.setattr(f"{HEAD}.CHUNK_ROWS", chunk)
    again, ours = gradients(model, ids, True, fp8.forward_context)
    assert again == pytest.approx(loss, rel=1e-4)
    assert error(ours, expected) < 0.02  # another shape may have another kernel, which rounds elsewhere


def assert_recomputing_changes_no_bit(choice, config=CONFIG):
    ids = tokens(4)
    (model, fp8), (other, _) = (calibrated("fused", ids=ids, recompute=r, config=config) for r in ("none", choice))
    loss, expected = gradients(model, ids, True, fp8.forward_context)
    again, ours = gradients(other, ids, True, fp8.forward_context)
    assert again == loss
    common.assert_same_tensors(ours, expected)
    common.assert_same_tensors(state.capture(model), state.capture(other))  # amaxes are those of one pass


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("choice", ["mlp", "full"])
def test_recomputing_changes_no_bit(choice):
    assert_recomputing_changes_no_bit(choice)


@pytest.mark.usefixtures("deterministic")
def test_repeats_bit_for_bit():
    """From nothing: calibration, two forwards and backwards, and the scales that they leave."""
    ids, runs = tokens(4), []
    for _ in range(2):
        model, fp8 = calibrated("fused", ids=ids)
        runs.append([*(gradients(model, ids, True, fp8.forward_context) for _ in range(2)), state.capture(model)])
    for (loss, ours), (other, theirs) in zip(runs[0][:2], runs[1][:2], strict=True):
        assert loss == other
        common.assert_same_tensors(ours, theirs)
    common.assert_same_tensors(runs[0][2], runs[1][2])


@pytest.mark.usefixtures("deterministic")
def test_gradients_of_micro_batches_add_up():
    one, two = tokens(4), tokens(4, seed=1)
    model, fp8 = calibrated("fused", ids=one)

    def micro_batch(ids, first):
        with fp8.forward_context():
            loss = common.loss_of(model, True)(ids, first, 0.5)
        loss.backward()

    with state.restored(model):
        _, first = gradients(model, one, True, fp8.forward_context, True, 0.5)
        _, second = gradients(model, two, True, fp8.forward_context, False, 0.5)
    model.zero_grad(set_to_none=True)
    micro_batch(one, True)
    common.assert_same_tensors(common.grads(model), first)
    micro_batch(two, False)
    assert error(common.grads(model), {name: first[name] + second[name] for name in first}) < 1e-5


@pytest.mark.parametrize("how", [{"upstream": 2.0**6}, {"upstream": 2.0**-6}, {"scale": 2.0**-6}], ids=str)
def test_a_power_of_two_scales_the_heads_gradient_exactly(how):
    """What flows on into the blocks is rounded anew; the embedding's rows of tokens that are not read are the head's
    alone."""
    ids, factor = tokens(4), next(iter(how.values()))
    model, fp8 = calibrated("fused", ids=ids)
    with state.restored(model):
        loss, expected = gradients(model, ids, True, fp8.forward_context)
    again, ours = gradients(model, ids, True, fp8.forward_context, **how)
    assert again == (loss * factor if "scale" in how else loss)
    unread = torch.ones(len(expected["tokens.weight"]), dtype=torch.bool, device="cuda")
    unread[ids[:, :-1].flatten().long()] = False
    assert torch.count_nonzero(expected["tokens.weight"][unread])
    assert torch.equal(ours["tokens.weight"][unread], expected["tokens.weight"][unread] * factor)
    for name in ("head.layer_norm_weight", "head.layer_norm_bias"):
        assert torch.equal(ours[name], expected[name] * factor), name


# Evaluation


def test_an_evaluations_logits_are_those_of_its_loss():
    ids = tokens(4, seed=9)
    ids[1, 40:] = -1
    model, fp8 = calibrated("fused", ids=tokens(4))
    inputs, targets = split(ids)
    with evaluating(model, fp8):
        loss, logits = common.loss_of(model, True)(ids), model(inputs)
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits[..., :VOCAB].double().flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_an_evaluation_computes_no_gradient(monkeypatch):
    """Parameters ask for one also where gradients are off."""
    model, fp8 = calibrated("fused", ids=tokens(4))
    modes = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    for kernel in ("softmax_gradient_cast", "probability_rows"):
        monkeypatch.setattr(f"{HEAD}.{kernel}", lambda *_: pytest.fail("the head computed its gradient"))
    with evaluating(model, fp8):
        assert not common.loss_of(model, True)(tokens(4)).requires_grad
    assert modes == [False] * 3
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("deterministic")
def test_training_goes_on_as_if_there_had_been_no_evaluation():
    losses, states = [], []
    for evaluations in (0, 2):
        model, fp8 = calibrated("fused", ids=tokens(4))
        gradients(model, tokens(4, seed=1), True, fp8.forward_context, True)
        for seed in range(evaluations):
            with evaluating(model, fp8):
                common.loss_of(model, True)(8 * tokens(2, seed=seed) % VOCAB)
        losses.append([gradients(model, tokens(4, seed=s), True, fp8.forward_context, True)[0] for s in (2, 3)])
        states.append(state.capture(model))
    assert losses[0] == losses[1]
    common.assert_same_tensors(*states)


# What runs


def test_a_block_casts_the_gradient_that_the_one_below_needs(monkeypatch):
    """Only the last block casts its output's gradient itself; the others' come with the normalisation's backward, which
    spares them bfloat16's rounding: the gradient is as close to bf16's, and not the same."""
    from gpt2_fp8.layers import fused

    _, expected = gradients(build("reference"), tokens(), False, common.bf16)
    model, fp8 = calibrated("fused")
    calls, cast = [], fused.cast_transpose
    monkeypatch.setattr(fused, "cast_transpose", lambda *given, **more: calls.append(1) or cast(*given, **more))
    _, handed = gradients(model, tokens(), True, fp8.forward_context, first=True)
    assert len(calls) == 3 + 3 + 1  # attention's output, its packed gradient, the last block's output gradient
    assert all(block.received is None for block in model.blocks)
    for block in model.blocks:
        block.below[0] = None
    calls.clear()
    _, apart = gradients(model, tokens(), True, fp8.forward_context, first=True)
    assert len(calls) == 3 + 3 + 3
    assert error(handed, apart) > 0
    assert error(handed, expected) == pytest.approx(error(apart, expected), rel=0.05)


def test_products_with_an_activation_are_used_and_as_exact(monkeypatch):
    """Each block has one forward and one backward of them, and two weight gradients; products and kernels of their own
    give the same gradient, up to what bfloat16 and FP8 round in between."""
    from gpt2_fp8.layers import fp8_linear

    _, expected = gradients(build("reference"), tokens(), False, common.bf16)
    calls, found = [], {}
    for name in ("product_activation", "product_activation_backward", "weight_gradient"):
        real = getattr(fp8_linear, name)
        noted = functools.partial(lambda real, *given, **more: calls.append(1) or real(*given, **more), real)
        monkeypatch.setattr(fp8_linear, name, noted)
    for fits in (fp8_linear.fits, lambda a, b: False):
        monkeypatch.setattr(fp8_linear, "fits", fits)
        model, fp8 = calibrated("fused")
        calls.clear()
        _, gradient = gradients(model, tokens(), True, fp8.forward_context, first=True)
        found[len(calls)] = gradient
    assert sorted(found) == [0, 12]
    assert error(found[12], expected) == pytest.approx(error(found[0], expected), rel=0.05)


def test_a_gradient_that_is_not_the_block_aboves_is_cast_again():
    """A block's output with a second use: its gradient is the sum of two."""
    gradient = {}
    for spoilt in (False, True):
        model, fp8 = calibrated("fused")
        lower, upper, x = model.blocks[0], model.blocks[1], torch.randn(2, 128, 256, device="cuda").bfloat16()
        with fp8.forward_context():
            model.scales.begin(True)
            middle = lower(x.requires_grad_(), True)
            out = upper(middle, True).float().sum()
        (out + (middle.float().sum() * 100.0 if spoilt else 0.0)).backward()
        gradient[spoilt] = lower.mlp.fc2_bias.grad.clone()
        assert lower.received is None
    torch.testing.assert_close(
        gradient[True] - gradient[False], torch.full_like(gradient[True], 25600.0), rtol=0.02, atol=0
    )
