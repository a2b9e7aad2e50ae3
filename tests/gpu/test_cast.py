"""The FP8 cast in both layouts against torch's."""

import pytest
import torch

from gpt2_fp8.layers.fp8_cast import cast_saturating
from tests.gpu import kernels
from tests.gpu.kernels import DEVICE, E4M3, FORMATS, SHAPES, assert_transposed, bits, normal, slot_of, to_fp8

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels")]
cast_transpose, column_sums, reduce_columns = kernels.cast_transpose, kernels.column_sums, kernels.reduce_columns


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [2.0**4, 37.3])
@pytest.mark.parametrize("shape", [(16, 16), (48, 144), (112, 1584), (144, 1600), (272, 2064), (4112, 48)])
def test_cast_is_torchs_of_the_product_in_float32(shape, scale, dtype, given):
    """Byte for byte, with infinity and NaN, where the last block has few rows or columns."""
    x, infinity = normal(*shape, dtype=given), float("inf")
    for special in ({}, {(3, 5): float("nan"), (-1, -1): float("nan")}, {(0, 0): -infinity, (-2, -3): infinity}):
        for place, value in special.items():
            x[place] = value
        slot, number = slot_of(dtype, scale), ~x.isnan()
        q, qt, sums = cast_transpose(x, slot, sums=True)
        want = cast_saturating(x.float() * slot.scale, dtype)
        assert torch.equal(q.float().isnan(), ~number)
        assert torch.equal(q.view(torch.uint8)[number], want.view(torch.uint8)[number])
        assert_transposed(q, qt)
        assert slot.amax.item() == x[number].abs().max().item() > 0
        close = {"rtol": 1e-6, "atol": 4e-4, "equal_nan": True}
        torch.testing.assert_close(column_sums(sums), x.double().sum(0), **close)


@pytest.mark.parametrize(("shape", "start"), [((24, 16), 0), ((16, 24), 0), ((16, 16), 4)])
def test_what_it_cannot_read_is_refused(shape, start):
    x = normal(shape[0] * shape[1] + start)[start:].view(shape)
    with pytest.raises(AssertionError):
        cast_transpose(x, slot_of(E4M3))


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", kernels.SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cast_is_torchs(shape, scale, dtype, given):
    x = normal(*shape, dtype=given)
    slot = slot_of(dtype, scale)
    q, qt, partial = cast_transpose(x, slot)
    # multiplying by a power of two rounds nothing
    assert torch.equal(bits(q), bits(to_fp8(x.double(), scale, dtype)))
    assert_transposed(q, qt)
    assert (slot.amax.item(), slot.scale.item()) == (x.abs().max().item(), scale)
    assert partial.numel() == 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_scale_that_rounds(dtype):
    x = normal(272, 768)
    slot = slot_of(dtype, 37.3)
    q, qt, _ = cast_transpose(x, slot)
    kernels.assert_written(slot, x.double(), 2.0**-23 * x.double().abs(), q, qt)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", kernels.SCALES)
def test_extreme_values(scale, dtype, given):
    x = torch.zeros(48, 144, device=DEVICE, dtype=given)
    largest = torch.finfo(given).max
    extremes = torch.tensor([0.0, -0.0, largest, -largest, float("inf"), -float("inf")], device=DEVICE, dtype=given)
    x[17, :6] = extremes
    x[-1, -6:] = extremes
    q, qt, _ = cast_transpose(x, slot_of(dtype, scale))
    assert torch.equal(bits(q), bits(to_fp8(x.double(), scale, dtype)))
    assert torch.all(q[17, 4:6].float().abs() == kernels.LARGEST[dtype])
    assert_transposed(q, qt)


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_stays_nan_alone(dtype):
    x = normal(80, 144)
    x[79, 143] = x[3, 5] = float("nan")
    q, qt, _ = cast_transpose(x, slot_of(dtype))
    assert torch.equal(q.float().isnan(), x.isnan())
    assert torch.equal(qt.float().isnan(), x.isnan().t())


def test_rounds_half_to_even():
    x = torch.zeros(16, 16, device=DEVICE)
    x[0, :4] = torch.tensor([17.0, 19.0, -17.0, 2.0**-10])  # E4M3: between 16 and 18, 18 and 20, 0 and 2^-9
    q, _, _ = cast_transpose(x, slot_of(E4M3))
    assert q[0, :4].tolist() == [16.0, 20.0, -16.0, 0.0]


@pytest.mark.parametrize("place", [(0, 0), (271, 0), (0, 767), (271, 767), (128, 127)])
def test_amax_is_found_anywhere(place):
    x = normal(272, 768)
    x[place] = -100.0
    slot = slot_of(E4M3, 2.0**10)
    cast_transpose(x, slot)
    assert slot.amax.item() == 100.0


@pytest.mark.parametrize("shape", [*SHAPES, *kernels.LARGE])
def test_column_sums_are_those_before_the_cast(shape):
    x, slot = normal(*shape), slot_of(E4M3, 2.0**4 if shape in kernels.LARGE else 2.0**16)
    q, qt, partial = cast_transpose(x, slot, sums=True)
    assert torch.equal(bits(q), bits(to_fp8(x.double(), slot.scale.item(), q.dtype)))
    assert_transposed(q, qt)
    assert slot.amax.item() == x.abs().max().item()
    atol = 2e-4 if shape in kernels.LARGE else 1e-5
    torch.testing.assert_close(column_sums(partial), x.double().sum(0), rtol=1e-6, atol=atol)


def test_writes_into_what_it_is_given():
    x = normal(80, 144)
    fresh = cast_transpose(x, slot_of(kernels.E5M2))
    pair = kernels.empty_pair(80, 144, kernels.E5M2, x.device)
    q, qt, _ = cast_transpose(x, slot_of(kernels.E5M2), out=pair)
    assert q is pair[0]
    assert qt is pair[1]
    assert torch.equal(bits(q), bits(fresh[0]))
    assert torch.equal(bits(qt), bits(fresh[1]))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("parts", "n"), [(1, 16), (5, 48), (128, 768), (300, 1600), (257, 2064), (131, 144)])
def test_reduce_columns(parts, n, add):
    """Also of rows that lie apart."""
    for partial in (normal(parts, n, dtype=torch.float32), *normal(parts, 3, n, dtype=torch.float32).unbind(1)):
        before = normal(n, seed=1, dtype=torch.float32) if add else torch.full((n,), float("nan"), device=DEVICE)
        one, other = before.clone(), before.clone()
        for out in (one, other):
            reduce_columns(partial, out, add)
        want = partial.double().sum(0) + (before.double() if add else 0)
        torch.testing.assert_close(one.double(), want, rtol=1e-6, atol=3e-5)
        assert torch.equal(one, other)


def test_more_elements_than_int32_counts():
    kernels.need(16)
    m, n = 65552, 32784
    assert m * n > 2**31
    x = torch.zeros(m, n, device=DEVICE, dtype=torch.bfloat16)
    x[-16:] = 2.0
    x[:, -16:] = 4.0
    q, qt, _ = cast_transpose(x, slot_of(E4M3))
    assert torch.all(q[-16:].float() == x[-16:])
    assert torch.all(q[:, -16:].float() == 4.0)
    assert torch.all(qt[-16:].float() == 4.0)
    assert torch.all(qt[:, -16:].float() == x[-16:].t())
    assert torch.all(q[:16, :-16].float() == 0)


def test_a_launch_for_another_gpu_is_an_error_and_leaves_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.ones(128, 128, dtype=torch.bfloat16, device="cuda:1")
    slot = kernels.Slot(*(torch.ones(1, device="cuda:1") for _ in range(3)), E4M3)
    with torch.cuda.device(1):
        cast_transpose(x, slot)  # it is compiled now
    with pytest.raises((RuntimeError, ValueError)):
        cast_transpose(x, slot)
    assert torch.cuda.current_device() == 0
