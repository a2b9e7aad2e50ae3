"""LayerNorm and RMSNorm cast to FP8, their statistics and their backward, against float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu import kernels
from tests.gpu.kernels import DEVICE, E4M3, E5M2, FORMATS, LARGEST, assert_transposed, column_sums, normal, slot_of

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels")]
layer_norm_backward, layer_norm_cast = kernels.layer_norm_backward, kernels.layer_norm_cast

SHAPES = [(64, 64), (128, 768), (16, 16), (16, 48), (80, 144), (272, 768), (48, 1600), (80, 2064)]
# more rows to a program, a last tile of fewer
SHAPES += [(8208, 144), (16432, 144), (16912, 1280), (16912, 1600), (48, 2048), (16912, 2048)]
# one block of four rows in a forward, and a backward of one stage; with larger tiles and smaller ones
SHAPES += [(8464, 2064), (48, 2304), (16912, 2304), (16912, 3072), (16, 4096), (80, 4096), (8464, 4096)]
EPSILON = 1e-5
of_norms = pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])


def parameters(n, rms=False):
    """The weight and the bias of a norm; RMSNorm has none."""
    weight, bias = normal(n, seed=2, dtype=torch.float32) * 0.2 + 1, normal(n, seed=3, dtype=torch.float32) * 0.1
    return weight, None if rms else bias


def exact_norm(x, weight, bias):
    if bias is None:
        return F.rms_norm(x.double(), x.shape[1:], weight.double(), EPSILON)
    return F.layer_norm(x.double(), x.shape[1:], weight.double(), bias.double(), EPSILON)


def assert_statistics(statistics, x, mean_rtol, rstd_rtol):
    exact = x.double()
    variance = exact.square().mean(1)
    if statistics.mean is not None:
        mean, variance = exact.mean(1), exact.var(1, correction=0)
        torch.testing.assert_close(statistics.mean.double(), mean, rtol=mean_rtol, atol=1e-6)
    torch.testing.assert_close(statistics.rstd.double(), (variance + EPSILON).rsqrt(), rtol=rstd_rtol, atol=0)


@of_norms
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", kernels.SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, scale, dtype, rms):
    x = normal(*shape) * 2 + 0.5
    weight, bias = parameters(shape[1], rms)
    slot, exact = slot_of(dtype, scale), exact_norm(x, weight, bias)
    q, qt, statistics = layer_norm_cast(x, weight, bias, EPSILON, slot)
    kernels.assert_written(slot, exact, 1e-5 * exact.abs() + 4e-6, q, qt)
    assert_statistics(statistics, x, 1e-6, 1e-5)
    assert (statistics.mean is None) == rms


@of_norms
@pytest.mark.parametrize("n", [144, 4096])
def test_one_layout_is_the_first_of_both(n, rms):
    x = normal(80, n)
    q, _, _ = layer_norm_cast(x, *parameters(n, rms), EPSILON, slot_of(E4M3))
    alone, empty, _ = layer_norm_cast(x, *parameters(n, rms), EPSILON, slot_of(E4M3), both=False)
    assert torch.equal(alone.view(torch.uint8), q.view(torch.uint8))
    assert empty.numel() == 0


@pytest.mark.parametrize("n", [48, 144, 768, 1600, 4096])
def test_a_large_mean_costs_no_precision(n):
    """Mean 1,002, deviation 1, which bfloat16 rounds to 1,000 or 1,004: where float32 takes the squared mean from the
    mean of squares, the variance is percents off."""
    x = (normal(80, n, dtype=torch.float32) + 1002).bfloat16()
    assert x.double().std(1).min() > 1
    _, _, statistics = layer_norm_cast(x, *parameters(n), EPSILON, slot_of(E4M3))
    assert_statistics(statistics, x, 1e-6, 2e-5)


@pytest.mark.parametrize("place", [0, 63, 64, -1])
def test_one_outlier_in_each_row(place):
    """A channel far off the others, wherever it lies. N 2^-22 bounds what cancels if it serves as the rows' shift."""
    n = 1600
    x = normal(48, n)
    x[:, place] = 2000.0
    _, _, statistics = layer_norm_cast(x, *parameters(n), EPSILON, slot_of(E4M3))
    exact = x.double()
    deviation = exact.std(1, correction=0)
    assert torch.all((statistics.mean.double() - exact.mean(1)).abs() <= 1e-4 * deviation)
    torch.testing.assert_close(statistics.rstd.double() * deviation, torch.ones_like(deviation), rtol=n / 2**22, atol=0)


def test_constant_rows_give_the_bias():
    x = torch.zeros(48, 144, device=DEVICE, dtype=torch.bfloat16)
    x[1], x[47] = 1000.0, -3.0
    weight, bias = parameters(144)
    q, qt, statistics = layer_norm_cast(x, weight, bias, EPSILON, slot_of(E4M3))
    assert torch.equal(statistics.mean, x[:, 0].float())
    torch.testing.assert_close(statistics.rstd, torch.full_like(statistics.rstd, EPSILON**-0.5))
    assert torch.equal(q.float(), bias.to(q.dtype).float().expand(48, 144))
    assert_transposed(q, qt)


@of_norms
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(bad, rms):
    x = normal(80, 144)
    x[5, 100] = bad
    weight, bias = parameters(144, rms)
    q, qt, statistics = layer_norm_cast(x, weight, bias, EPSILON, slot_of(E4M3))
    gradient = layer_norm_backward(normal(80, 144), x, statistics, weight, None, slot_of(E5M2))
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[5] = True
    for got in (q, qt.t(), gradient.q, gradient.qt.t(), gradient.dx):
        assert not got.float().isnan()[~spoilt].any()
        assert got.float()[5].isnan().any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_saturates(dtype):
    x = normal(48, 144)
    slot = slot_of(dtype)
    weight, bias = torch.ones(144, device=DEVICE), torch.zeros(144, device=DEVICE)
    bias[143], bias[0] = 1e6, -1e6
    q, qt, _ = layer_norm_cast(x, weight, bias, EPSILON, slot)
    assert torch.all(q[:, 143].float() == LARGEST[dtype])
    assert torch.all(q[:, 0].float() == -LARGEST[dtype])
    assert_transposed(q, qt)
    assert slot.amax.item() == pytest.approx(1e6, rel=1e-4)


def exact_backward(dy, x, weight, bias, residual):
    given = [None if tensor is None else tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    exact_norm(*given).backward(dy.double())
    dx, *others = (None if tensor is None else tensor.grad for tensor in given)
    return dx + (0 if residual is None else residual.double()), *others


@of_norms
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [None, *FORMATS])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, dtype, with_residual, rms):
    x, dy = normal(*shape) * 2 + 0.5, normal(*shape, seed=4)
    residual = normal(*shape, seed=5) if with_residual else None
    weight, bias = parameters(shape[1], rms)
    slot = None if dtype is None else slot_of(dtype, 16.0)
    _, _, statistics = layer_norm_cast(x, weight, bias, EPSILON, slot_of(E4M3))
    dx, q, qt, sums = layer_norm_backward(dy, x, statistics, weight, residual, slot)
    exact, of_weight, of_bias = exact_backward(dy, x, weight, bias, residual)
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx.double(), exact, rtol=2.0**-8, atol=2e-5)
    torch.testing.assert_close(column_sums(sums[:, 0]), of_weight, rtol=1e-5, atol=1e-3)
    if not rms:
        torch.testing.assert_close(column_sums(sums[:, 1]), of_bias, rtol=1e-5, atol=1e-3)
    if dtype is None:
        assert q.numel() == qt.numel() == 0
        return
    torch.testing.assert_close(column_sums(sums[:, 2]), exact.sum(0), rtol=1e-5, atol=1e-3)
    kernels.assert_written(slot, exact, 1e-5 * exact.abs() + 1e-5, q, qt)


@of_norms
@pytest.mark.parametrize("dtype", FORMATS)
def test_backward_saturates(dtype, rms):
    x, residual = normal(80, 144), torch.zeros(80, 144, device=DEVICE, dtype=torch.bfloat16)
    residual[-1, -3:] = torch.tensor([1e30, -1e30, float("inf")]).to(residual)
    weight, bias = parameters(144, rms)
    slot = slot_of(dtype)
    _, _, statistics = layer_norm_cast(x, weight, bias, EPSILON, slot_of(dtype))
    _, q, qt, _ = layer_norm_backward(torch.zeros_like(x), x, statistics, weight, residual, slot)
    assert q[-1, -3:].tolist() == [LARGEST[dtype], -LARGEST[dtype], LARGEST[dtype]]
    assert torch.count_nonzero(q.float()) == 3
    assert_transposed(q, qt)
    assert slot.amax.item() == float("inf")


def test_more_elements_than_int32_counts():
    """A slice has as many rows as change nothing in a sum's order."""
    kernels.need(50)
    m, n, step = 1048640, 2048, 262160
    assert m * n > 2**31
    parts = [slice(start, start + step) for start in range(0, m, step)]
    x, (weight, bias) = kernels.large_normal(m, n), parameters(n)

    def forward(rows, slot):
        q, qt, statistics = layer_norm_cast(x[rows], weight, bias, EPSILON, slot)
        return [q, qt, *statistics], None

    q, _, *statistics = kernels.assert_slices_are_alone(forward, slot_of(E4M3, 16.0), parts, transposed=(1,))
    exact = exact_norm(x[-16:], weight, bias)
    kernels.assert_fp8(q[-16:], exact, 16.0, 1e-5 * exact.abs() + 4e-6)
    del q, _
    dy, residual = kernels.large_normal(m, n, seed=4), kernels.large_normal(m, n, seed=5)

    def backward(rows, slot):
        of_rows = kernels.Statistics(*(tensor[rows] for tensor in statistics))
        *tensors, partial = layer_norm_backward(dy[rows], x[rows], of_rows, weight, residual[rows], slot)
        return tensors, torch.stack([column_sums(partial[:, i]) for i in range(3)])

    slot = slot_of(E5M2, 16.0)  # the sums are of a million numbers of order 1
    kernels.assert_slices_are_alone(backward, slot, parts, transposed=(2,), atol=0.1)
