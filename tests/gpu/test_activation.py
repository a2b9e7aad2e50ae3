"""GELU, squared ReLU and their gradients, cast to FP8, against float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.gpu import kernels
from tests.gpu.kernels import (
    DEVICE,
    E4M3,
    E5M2,
    FORMATS,
    KINDS,
    LARGEST,
    assert_fp8,
    assert_transposed,
    normal,
    slot_of,
)

pytestmark = pytest.mark.fp8

# float32's error in gelu(x) and gelu'(x): relative from the exponent (|2u| log2(e) is at most 126 before the result is
# 0 in float32), absolute from 1 - s and from sums that cancel. A product of two numbers of bfloat16 is exact.
RELATIVE, ABSOLUTE = {"gelu": 4e-5, "relu_squared": 0.0}, {"gelu": 1e-6, "relu_squared": 0.0}
EXACT = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "relu_squared": lambda x: x.relu().square()}
# of large tensors, a program has several tiles; the last is a model's of 1,280 channels
WIDE = [*kernels.LARGE, (4096, 5120)]
SIZES = [*itertools.product(kernels.SHAPES, kernels.SCALES), *((shape, 16.0) for shape in WIDE)]
activation_backward_cast, activation_cast = kernels.activation_backward_cast, kernels.activation_cast
column_sums = kernels.column_sums
of_kinds = pytest.mark.parametrize("kind", KINDS)


def exact_activation(kind, h):
    return EXACT[kind](h.double())


def exact_backward(kind, dy, h):
    x = h.double().requires_grad_()
    EXACT[kind](x).backward(dy.double())
    return x.grad


@of_kinds
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("shape", "scale"), SIZES)
def test_forward(shape, scale, dtype, kind):
    h, slot = normal(*shape) * 3, slot_of(dtype, scale)
    q, exact = activation_cast(kind, h, slot), exact_activation(kind, h)
    assert q.is_contiguous()
    # a relative error alone: x s has no sum that cancels
    kernels.assert_written(slot, exact, RELATIVE[kind] * exact.abs() + 1e-30, q, rel=1e-6)


@of_kinds
@pytest.mark.parametrize("dtype_y", FORMATS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("shape", "scale"), SIZES)
def test_backward(shape, scale, dtype, dtype_y, kind):
    """The gradient's cast and sums; and the activation transposed, byte for byte what the forward's cast was."""
    h, dy = normal(*shape) * 3, normal(*shape, seed=1)
    slot, slot_y = slot_of(dtype, scale), slot_of(dtype_y, 8.0, amax=0.5)
    q, qt, yt, partial = activation_backward_cast(kind, dy, h, slot, slot_y)
    exact = exact_backward(kind, dy, h)
    kernels.assert_written(slot, exact, RELATIVE[kind] * exact.abs() + ABSOLUTE[kind] * dy.double().abs(), q, qt)
    atol = 1e-3 if shape in WIDE else 1e-4
    torch.testing.assert_close(column_sums(partial), exact.sum(0), rtol=1e-5, atol=atol)
    assert_transposed(activation_cast(kind, h, slot_of(dtype_y, 8.0)), yt)
    assert slot_y.amax.item() == 0.5  # the forward's to record


@of_kinds
def test_every_small_bfloat16(kind):
    """All bfloat16 numbers of magnitude 2^-8 to 16, both signs: the constants are right everywhere."""
    magnitudes = torch.arange(0x3B80, 0x4180, dtype=torch.int16).view(torch.bfloat16)
    h = torch.cat([magnitudes, -magnitudes]).view(-1, 16).to(DEVICE)
    for dtype in FORMATS:
        exact = exact_activation(kind, h)
        assert_fp8(activation_cast(kind, h, slot_of(dtype, 16.0)), exact, 16.0, RELATIVE[kind] * exact.abs() + 1e-30)
        exact = exact_backward(kind, torch.ones_like(h), h)
        gradient = activation_backward_cast(kind, torch.ones_like(h), h, slot_of(dtype, 16.0), slot_of(dtype))
        assert_fp8(gradient.q, exact, 16.0, RELATIVE[kind] * exact.abs() + ABSOLUTE[kind])


@of_kinds
@pytest.mark.parametrize("dtype", FORMATS)
def test_extreme_values_forward(dtype, kind):
    largest = torch.finfo(torch.bfloat16).max
    h = torch.zeros(48, 144, device=DEVICE, dtype=torch.bfloat16)
    h[-1, -9:] = torch.tensor([0.0, -0.0, largest, -largest, float("inf"), 100.0, -100.0, 1e-30, float("nan")]).to(h)
    q = activation_cast(kind, h, slot_of(dtype))
    got = q[-1, -9:].float()
    most, rounded = LARGEST[dtype], kernels.to_fp8(exact_activation(kind, torch.tensor(100.0)), 1.0, dtype).item()
    assert got[:8].tolist() == [0.0, 0.0, most, 0.0, most, rounded, 0.0, 0.0]
    assert got[8].isnan()
    assert torch.count_nonzero(q[:-1].float()) == 0
    assert_transposed(q, activation_backward_cast(kind, torch.zeros_like(h), h, slot_of(dtype), slot_of(dtype)).yt)


@of_kinds
@pytest.mark.parametrize("dtype", FORMATS)
def test_extreme_values_backward(dtype, kind):
    """Far from 0 GELU's derivative is 1 or 0; what flows back saturates, and NaN stays where it is."""
    largest = torch.finfo(torch.bfloat16).max
    h = torch.zeros(48, 144, device=DEVICE, dtype=torch.bfloat16)
    dy = torch.zeros_like(h)
    h[-1, -6:] = torch.tensor([1e4, -1e4, 1e4, -1e4, 0.0, 1.0]).to(h)
    dy[-1, -6:] = torch.tensor([1.0, 1.0, largest, largest, -largest, float("nan")]).to(h)
    q, qt, _, _ = activation_backward_cast(kind, dy, h, slot_of(dtype), slot_of(dtype))
    got = q[-1, -6:].float()
    most, squared = LARGEST[dtype], kernels.to_fp8(2 * h[-1, -6].double(), 1.0, dtype).item()
    expected = {"gelu": [1.0, 0.0, most, 0.0, -most], "relu_squared": [squared, 0.0, most, 0.0, 0.0]}
    assert got[:5].tolist() == expected[kind]
    assert torch.equal(q.float().isnan(), dy.isnan())
    assert_transposed(q, qt)


def test_more_elements_than_int32_counts():
    kernels.need(40)
    m, n, step = 65600, 32784, 16400
    assert m * n > 2**31
    parts = [slice(start, start + step) for start in range(0, m, step)]
    h, dy = kernels.large_normal(m, n), kernels.large_normal(m, n, seed=1)
    slot = slot_of(E4M3, 16.0)
    kernels.assert_slices_are_alone(lambda rows, slot: ([activation_cast("gelu", h[rows], slot)], None), slot, parts)
    assert slot.amax.item() == pytest.approx(h.max().item(), rel=1e-6)  # far from 0, gelu(h) is h

    def backward(rows, slot):
        *tensors, partial = activation_backward_cast("gelu", dy[rows], h[rows], slot, slot_of(E4M3, 16.0))
        return tensors, column_sums(partial)

    kernels.assert_slices_are_alone(backward, slot_of(E5M2, 16.0), parts, transposed=(1, 2))
