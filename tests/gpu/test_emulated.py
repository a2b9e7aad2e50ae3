"""The emulated layers on a GPU: their casts and scales are the FP8 kernels', to the last bit; one step is as close."""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8.engine.cuda_graphs import compile_function
from gpt2_fp8.fp8 import state
from gpt2_fp8.kernels.formats import Slot
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales
from gpt2_fp8.layers.fp8_cast import BLOCK, cast, cast_saturating
from tests.gpu import common
from tests.gpu.common import CONFIG, build, calibrated, computing, error, gradients, hopper, tokens
from tests.gpu.kernels import E4M3, E5M2, cast_transpose

pytestmark = [pytest.mark.fp8, hopper]
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])


def values(shape, scale=1.0, dtype=torch.bfloat16):
    """Numbers of many magnitudes, among them what saturates, zeros, and what becomes subnormal in FP8."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 2.0 ** (torch.rand(shape, generator=generator) * 40 - 30)
    x[0, :4] = torch.tensor([1e30, -1e30, 0.0, -0.0])
    return (x * scale).to(dtype).cuda()


def fused_cast(x, dtype, scale):
    """The fused layers' own kernel, in both layouts, and the amax that it records."""
    scale, seen = scale.reshape(1), torch.zeros(1, device="cuda")
    q, qt, _ = cast_transpose(x, Slot(scale, 1 / scale, seen, dtype))
    return q, qt, seen


# Casts


@formats
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_a_cast_is_the_fused_kernels_bit_for_bit(dtype, source):
    x, scale = values((256, 512), dtype=source), torch.tensor(3.7, device="cuda")
    q, qt, seen = fused_cast(x, dtype, scale)
    ours = cast(x, "delayed", dtype, 1, BLOCK, scale)
    assert torch.equal(ours.values.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(ours.t().values.contiguous().view(torch.uint8), qt.view(torch.uint8))
    assert ours.scale_inv == 1 / scale
    assert seen == x.abs().max().float()


@formats
def test_a_compiled_cast_has_the_same_bits(dtype):
    x, scale = values((256, 512)), torch.tensor(3.7, device="cuda")
    bits = lambda: cast_saturating(x.float() * scale, dtype).view(torch.uint8)  # noqa: E731
    assert torch.equal(compile_function(bits)(), bits())


@formats
@pytest.mark.parametrize("amax", [3.0, 1e-5, 7e4])
def test_current_scales_and_casts_are_transformer_engines(dtype, amax):
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer
    from transformer_engine_torch import DType

    x = torch.randn(256, 512, device="cuda").clamp(-3, 3).bfloat16()
    x = (x / x.abs().max() * amax).bfloat16()
    theirs = Float8CurrentScalingQuantizer(
        fp8_dtype=DType.kFloat8E4M3 if dtype == E4M3 else DType.kFloat8E5M2, device=torch.device("cuda")
    )(x)
    ours = cast(x, "current", dtype, 1, BLOCK)
    assert torch.equal(theirs._scale_inv.reshape(()), ours.scale_inv)
    assert torch.equal(theirs._data.view(torch.uint8), ours.values.view(torch.uint8))


@formats
@pytest.mark.parametrize(("dimensions", "rows"), [(1, 1), (2, BLOCK)], ids=["1 x 128", "128 x 128"])
def test_blocks_are_transformer_engines(dtype, dimensions, rows):
    from transformer_engine.pytorch import Float8BlockQuantizer
    from transformer_engine_torch import DType

    x = values((256, 384)).clamp(-1e4, 1e4)
    theirs = Float8BlockQuantizer(
        fp8_dtype=DType.kFloat8E4M3 if dtype == E4M3 else DType.kFloat8E5M2, rowwise=True, columnwise=False,
        force_pow_2_scales=True, amax_epsilon=0.0, block_scaling_dim=dimensions,
    )(x)  # fmt: skip
    ours = cast(x, "block", dtype, rows, BLOCK)
    assert torch.equal(theirs.dequantize(dtype=torch.float32), ours.values.float())


def test_scales_follow_transformer_engines_over_a_history():
    """The formula of its delayed scaling, by its own kernel, step by step."""
    import transformer_engine.pytorch  # noqa: F401 - loads the next one's libraries
    import transformer_engine_torch as tex

    ours = Scales(DelayedScaling(history=4, margin=0, most_recent=False, forward=E4M3, gradient=E5M2))
    places = [ours.reserve("forward") for _ in range(3)]
    ours.allocate(torch.device("cuda"))
    history, scale = torch.zeros(4, 3, device="cuda"), torch.ones(3, device="cuda")
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        ours.begin(True)
        assert torch.equal(ours.scale, scale)
        history[0] = (torch.rand(3, generator=generator) * 10).cuda()
        for i, place in enumerate(places):
            ours.slot(place).amax.copy_(history[0, i : i + 1])
        tex.fused_amax_and_scale_update_after_reduction(
            history[0].clone(), [history], [scale], "max", tex.DType.kFloat8E4M3, 0
        )
    assert len(scale.unique()) == 3


# One step of a model


def run(ids, backend="emulated", **settings):
    model, fp8 = calibrated(backend, ids=ids, **settings)
    loss, ours = gradients(model, ids, backend == "fused", fp8.forward_context, True)
    return loss, ours, model


@pytest.fixture(scope="module")
def fused():
    """The fused layers with their head in bf16, as the emulated layers have it."""
    return run(tokens(4), "fused", keep_bf16=["head"])


def test_one_step_is_the_fused_layers(fused):
    """Rounding to FP8 turns a difference of a bfloat16 bit into one of an FP8 step: gradients of one origin differ by
    less than each differs from bf16's, and the loss by little."""
    loss, ours, _ = run(tokens(4))
    expected_loss, expected = gradients(build("reference"), tokens(4), False, common.bf16)
    assert loss == pytest.approx(fused[0], rel=2e-4)
    assert error(ours, fused[1]) < 0.8 * error(fused[1], expected)
    assert error(ours, expected) == pytest.approx(error(fused[1], expected), rel=0.15)
    assert loss == pytest.approx(expected_loss, rel=2e-3)


def test_calibration_finds_the_fused_layers_scales(fused):
    """The same tensors in the same places. Amaxes of weights are equal; others are of tensors computed in another
    order."""
    _, _, model = run(tokens(4))
    ours, theirs = model.scales, fused[2].scales
    assert ours.scale.shape == theirs.scale.shape
    weights = torch.arange(1, 2 * 4 * CONFIG.n_layer, 2)
    assert torch.equal(ours.history[0, weights], theirs.history[0, weights])
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=0.1, atol=0)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_one_step_is_transformer_engines(recipe):
    expected_loss, expected = gradients(build("reference"), tokens(4), False, common.bf16)
    theirs = run(tokens(4), "te", recipe=recipe, keep_bf16=["head"])[1]
    loss, ours, _ = run(tokens(4), recipe=recipe)
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert error(ours, theirs) < 0.9 * error(theirs, expected)
    assert error(ours, expected) == pytest.approx(error(theirs, expected), rel=0.2)


@pytest.mark.parametrize(
    ("recipe", "config"),
    [("delayed", CONFIG), ("current", CONFIG), ("block", replace(CONFIG, n_embd=320, n_head=5))],
    ids=["delayed", "current", "block"],
)
def test_compiled_is_as_uncompiled(recipe, config):
    """Sums in another order change single bits, and FP8 rounds some of those to another number.

    A width of 320 has a block that is full and one that is not. Compiling takes most of a minute each.
    """
    ids, found = tokens(4), []
    expected = gradients(build("reference", config=config), ids, False, common.bf16)[1]
    backend = computing("emulated", recipe=recipe, config=config)
    assert backend.compiled
    model, fp8 = calibrated("emulated", ids=ids, recipe=recipe, config=config)
    for compile in (False, True):
        loss = lambda given, first, scale: backend.loss(model, given, first, scale)  # noqa: E731
        loss = compile_function(loss, backend.compile_options) if compile else loss
        with state.restored(model):
            model.zero_grad(set_to_none=True)
            with fp8.forward_context():
                value = loss(ids, True, 1.0)
            value.backward()
            found.append((value.item(), common.grads(model)))
            if model.scales is not None:
                assert torch.all(model.scales.history[0] > 0), "a compiled backward records its amaxes"
    torch.compiler.reset()
    (loss, plain), (again, ours) = found
    assert again == pytest.approx(loss, rel=2e-4)
    assert error(ours, plain) < 0.8 * error(plain, expected)
    assert error(ours, expected) == pytest.approx(error(plain, expected), rel=0.15)
