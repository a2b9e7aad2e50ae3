"""Products whose epilogue is an activation, or its derivative, against float64 and the same arithmetic in torch.

Most operands are small whole numbers: every sum of their products is then exact in the tensor cores, which keep some
14 bits of one, so that all that is left to explain is the epilogue's own arithmetic.
"""

import pytest
import torch

from gpt2_fp8.kernels.product import (
    CODE_OF_ZERO,
    CODES,
    Operands,
    fits,
    product_activation,
    product_activation_backward,
)
from tests.gpu import kernels
from tests.gpu.kernels import DEVICE, E4M3, E5M2, LARGEST, assert_fp8, bits, column_sums, normal, slot_of
from tests.gpu.test_activation import ABSOLUTE, RELATIVE, exact_activation, exact_backward, of_kinds
from tests.gpu.test_gemm import operands as normal_operands

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels", "poison")]

# M, N, K, for 132 multiprocessors: one tile; nine; a block with slabs of its own; slabs that blocks share, and blocks
# with two; many blocks to a slab; many tiles to a block
SHAPES = [(64, 128, 128), (192, 384, 256), (64, 38400, 128), (448, 3072, 768), (4160, 640, 1024), (8256, 3072, 768)]
SMALL = (192, 384, 256)
FAST = 1e-2  # fast accumulation's error, relative to what is summed: as in test_gemm
UNITS = 2.0**-4, 2.0**-2  # of whole numbers: what they give is then about 1
Z_SCALE = 2.9  # of what squared ReLU's slope follows from: no power of two, for the reason below
ROOT = 2.0**-21  # the error of squared ReLU's gradient: 2^-23 of the square root, and some roundings of 2^-24


def whole(shape, dtype=E4M3, seed=0):
    """Operands of whole numbers between -3 and 3, a's format given."""
    m, n, k = shape
    generator = torch.Generator(DEVICE).manual_seed(seed)
    a, b = (torch.randint(-3, 4, (rows, k), device=DEVICE, generator=generator).float() for rows in (m, n))
    return Operands(a.to(dtype), b.to(E4M3), *(torch.tensor([unit], device=DEVICE) for unit in UNITS))


def exact_product(operands):
    a, b, *units = operands
    return a.double() @ b.double().t() * units[0].double() * units[1].double()


def exact_codes(h):
    """The codes of gelu'(h), as float64."""
    return (CODES * exact_backward("gelu", torch.ones_like(h, dtype=torch.float64), h)).round() + CODE_OF_ZERO


def assert_codes(slopes, h):
    """Those of float64, but for float32's error where a code is halfway between two."""
    assert slopes.dtype == torch.uint8
    off = (slopes.double() - exact_codes(h)).abs()
    assert off.max() <= 1
    assert torch.count_nonzero(off) <= off.numel() // 1000


def slopes_of(kind, h):
    """What the forward keeps for the slope, of h itself."""
    if kind == "gelu":
        return exact_codes(h).to(torch.uint8)
    return kernels.to_fp8(exact_activation(kind, h), Z_SCALE, E4M3)


def slope_of(slopes, z_slot=None):
    if slopes.dtype == torch.uint8:
        return (slopes.double() - CODE_OF_ZERO) / CODES
    return 2 * (slopes.double() * (z_slot or slot_of(E4M3, Z_SCALE)).scale_inv.double()).sqrt()


def backward(operands, slopes, slot, z_slot=None):
    """The gradient of the kind that the slopes are of."""
    kind = "gelu" if slopes.dtype == torch.uint8 else "relu_squared"
    return product_activation_backward(kind, operands, slopes, (z_slot or slot_of(E4M3, Z_SCALE)).scale_inv, slot)


def same_arithmetic(operands, slopes, slot):
    """The gradient in FP8, its amax, and itself in float64, of whole numbers: only the last steps round."""
    a, b, *units = operands
    one, codes = (torch.tensor([value], device=DEVICE) for value in (1.0, float(CODES)))
    unit = units[0] * units[1] * (one / codes)  # float32, as in the kernel
    sums = a.double() @ b.double().t() * (slopes.double() - CODE_OF_ZERO)
    assert sums.abs().max() < 2**24, "float32 has them exactly"
    sums = sums.float()
    q = kernels.to_fp8(sums * (unit * slot.scale), 1.0, slot.dtype)
    return q, (sums.abs().max() * unit).item(), sums.double() * unit.double()


def assert_gradient(gradient, operands, slopes, slot, z_slot=None):
    """GELU: equal bits, and sums of columns as near as float32's. Squared ReLU: as near as a square root of float32."""
    assert gradient.q.dtype == slot.dtype
    if slopes.dtype == torch.uint8:
        q, amax, exact = same_arithmetic(operands, slopes, slot)
        assert torch.equal(bits(gradient.q), bits(q))
        assert slot.amax.item() == amax
        torch.testing.assert_close(column_sums(gradient.sums), exact.sum(0), rtol=1e-5, atol=3e-3)
        return
    exact = exact_product(operands) * slope_of(slopes, z_slot)
    assert_fp8(gradient.q, exact, slot.scale.double(), ROOT * exact.abs())
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=2 * ROOT)
    # a number goes through fewer than 64 additions, each off by 2^-24
    off = (column_sums(gradient.sums) - exact.sum(0)).abs()
    assert torch.all(off <= 2.0**-18 * exact.abs().sum(0))


@of_kinds
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, with_bias, kind):
    """q is what the kernel of its own makes of h, to the last bit; so h was rounded to bfloat16."""
    operands, slot, other = whole(shape), slot_of(E4M3, 16.0), slot_of(E4M3, 16.0)
    assert fits(operands.a, operands.b)
    bias = normal(shape[1], seed=2) if with_bias else None
    q, slopes = product_activation(kind, operands, bias, slot)
    h = (exact_product(operands) + (bias.double() if with_bias else 0)).float().bfloat16()
    assert torch.equal(bits(q), bits(kernels.activation_cast(kind, h, other)))
    assert slot.amax.item() == pytest.approx(exact_activation(kind, h).abs().max().item(), rel=1e-6)
    assert other.amax.item() == pytest.approx(slot.amax.item(), rel=1e-6)
    if kind == "gelu":
        assert_codes(slopes, h)
    else:
        assert slopes is q


@of_kinds
@pytest.mark.parametrize("scale", kernels.SCALES)
def test_forward_scales(scale, kind):
    operands, bias, slot = whole(SMALL), normal(SMALL[1], seed=2), slot_of(E4M3, scale)
    q, _ = product_activation(kind, operands, bias, slot)
    exact = exact_activation(kind, (exact_product(operands) + bias.double()).float().bfloat16())
    assert_fp8(q, exact, scale, RELATIVE[kind] * exact.abs() + 1e-30)
    assert slot.scale.item() == scale
    if scale == 2.0**16:
        assert torch.any(q.float() == LARGEST[E4M3])
    if scale == 2.0**-16:
        assert torch.count_nonzero(q.float()) == 0


@of_kinds
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [SMALL, (448, 3072, 768), (4160, 640, 1024)])
def test_forward_of_normal_numbers(shape, with_bias, kind):
    """Sums that the tensor cores round, units that are no powers of two, a scale that rounds: what they may do to h
    explains every number."""
    a, b, _, *units = normal_operands(*shape)
    operands, slot = Operands(a, b, *units), slot_of(E4M3, {"gelu": 37.3, "relu_squared": 3.73}[kind])
    bias = normal(shape[1], seed=2) * 4 if with_bias else None
    q, slopes = product_activation(kind, operands, bias, slot)
    product = exact_product(operands)
    h = product + (bias.double() if with_bias else 0)
    noise = FAST * (product.abs() + product.square().mean().sqrt()) + 2.0**-8 * h.abs()
    # neither gelu nor gelu' is steeper than 1.13; gelu falls and rises once, gelu' has its largest value between
    of_z = {"gelu": 1.13 * noise + ABSOLUTE["gelu"], "relu_squared": (2 * h.abs() + noise) * noise}
    assert_fp8(q, exact_activation(kind, h), slot.scale.double(), of_z[kind], most=0.2)
    if kind == "relu_squared":
        return
    off = (slope_of(slopes) - exact_backward(kind, torch.ones_like(h), h)).abs()
    assert torch.all(off <= noise + 0.51 / CODES)
    assert off.square().mean().sqrt() < 1 / CODES


@of_kinds
@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, dtype, kind):
    """With what the forward itself keeps: the gradient's cast, its amax and its sums."""
    _, slopes = product_activation(kind, whole(shape, seed=1), normal(shape[1], seed=2), slot_of(E4M3, Z_SCALE))
    # no power of two: where the derivative is about 1, many whole numbers would lie halfway between two of FP8
    operands, slot = whole(shape, dtype), slot_of(dtype, 11.3)
    assert_gradient(backward(operands, slopes, slot), operands, slopes, slot)


@of_kinds
@pytest.mark.parametrize("given", [E5M2, E4M3])
@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("scale", kernels.SCALES)
def test_backward_scales_and_formats(scale, dtype, given, kind):
    operands, slopes, slot = whole(SMALL, given), slopes_of(kind, normal(*SMALL[:2], seed=1)), slot_of(dtype, scale)
    assert_gradient(backward(operands, slopes, slot), operands, slopes, slot)


@of_kinds
@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("shape", [SMALL, (448, 3072, 768), (4160, 640, 1024)])
def test_backward_of_normal_numbers(shape, dtype, kind):
    """As `test_forward_of_normal_numbers`: what the tensor cores' rounding may do to g explains every number."""
    a, b, _, *units = normal_operands(*shape, (dtype, E4M3))
    operands, h = Operands(a, b, *units), normal(*shape[:2], seed=1) * 2
    slopes, slot = slopes_of(kind, h), slot_of(dtype, {"gelu": 37.3, "relu_squared": 3.73}[kind])
    q, sums = backward(operands, slopes, slot)
    g, slope = exact_product(operands), slope_of(slopes)
    exact = g * slope
    noise = FAST * (g.abs() + g.square().mean().sqrt()) * slope.abs() + (RELATIVE[kind] + ROOT) * exact.abs()
    assert_fp8(q, exact, slot.scale.double(), noise, most=0.1)
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=2 * FAST)
    off = (column_sums(sums) - exact.sum(0)).abs()
    assert torch.all(off <= FAST * exact.square().sum(0).sqrt() + FAST / 5 * exact.abs().sum(0))
    # and the codes themselves: what they take from the gradient
    error = g * (slope - exact_backward(kind, torch.ones_like(g), h))
    assert error.norm() < {"gelu": 0.003, "relu_squared": 0.014}[kind] * exact.norm()


@of_kinds
def test_large_numbers_forward(kind):
    """Far from 0, gelu(h) is h or 0 and max(h, 0)^2 saturates or is 0, also where h's square is infinite in float32."""
    bias = torch.zeros(128, device=DEVICE, dtype=torch.bfloat16)
    bias[:6] = torch.tensor([1e4, -1e4, 1e30, -1e30, 3e38, -3e38]).to(bias)
    for columns in (slice(0, 2), slice(0, 6)):
        given = torch.zeros_like(bias)
        given[columns] = bias[columns]
        operands, slot = whole((64, 128, 128)), slot_of(E4M3)
        q, slopes = product_activation(kind, operands, given, slot)
        h = (exact_product(operands) + given.double()).float().bfloat16()
        large = given.float().abs() > 1e3
        most = torch.where(given > 0, LARGEST[E4M3], 0.0)[large]
        assert torch.equal(q.float()[:, large], most.expand(64, -1))
        assert torch.equal(bits(q), bits(kernels.activation_cast(kind, h, slot_of(E4M3))))
        assert slot.amax.item() == exact_activation(kind, h).float().max().item()
        if kind == "gelu":
            assert torch.equal(slope_of(slopes)[:, large], (given > 0).double()[large].expand(64, -1))


@of_kinds
def test_saturates_backward(kind):
    operands = whole((64, 128, 128), E5M2)
    operands.a_scale_inv.fill_(2.0**40)
    slopes, slot = slopes_of(kind, torch.full((64, 128), 10.0, device=DEVICE)), slot_of(E5M2)
    q, _ = backward(operands, slopes, slot)
    exact = exact_product(operands) * slope_of(slopes)
    assert torch.equal(q.float(), exact.sign().float() * LARGEST[E5M2])
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=1e-6)


def outlying(shape):
    """Whole numbers with some rows 128 times as large, a power of two: sums are as exact."""
    operands = whole(shape)
    operands.a[::97] = (operands.a[::97].float() * 128).to(E4M3)
    return operands


@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("part", [0.9, 2.0**6, 2.0**-12])
@pytest.mark.parametrize("with_bias", [False, True])
def test_squared_relus_slope_from_its_result(with_bias, part, dtype):
    """At a true width, h with outliers, and a scale that fits, that saturates the outliers, or that leaves nothing but
    them: r is as near as E4M3's rounding of r^2 allows, and the gradient as near to 2 r times g as float32's."""
    shape = (16384, 3072, 768)
    operands, bias = outlying(shape), normal(shape[1], seed=2) if with_bias else None
    h = (exact_product(operands) + (bias.double() if with_bias else 0)).float().bfloat16()
    z = exact_activation("relu_squared", h)
    z_slot = slot_of(E4M3, part * LARGEST[E4M3] / z.max().item())
    q, slopes = product_activation("relu_squared", operands, bias, z_slot)
    scale = z_slot.scale.double()
    assert_fp8(q, z, scale, 2.0**-23 * z)
    assert z_slot.amax.item() == z.max().item(), "a square of bfloat16 is exact in float32"
    # half of E4M3's last place, of normal and of subnormal numbers, and float32's of the scales
    most = z.clamp(max=LARGEST[E4M3] / scale)
    off = torch.maximum(most * 2.0**-4, 2.0**-10 / scale)
    low, high = (most - off).clamp(min=0).sqrt(), (most + off).sqrt()
    root = slope_of(slopes, z_slot) / 2
    assert torch.all((low * (1 - ROOT) <= root) & (root <= high * (1 + ROOT)))
    assert torch.any(z > most) == (part > 1)
    assert (torch.count_nonzero(root) / torch.count_nonzero(z) < 0.1).item() == (part < 0.5)

    given, slot = whole(shape, dtype, seed=1), slot_of(dtype, 2.0**-3)
    gradient = backward(given, slopes, slot, z_slot)
    assert_gradient(gradient, given, slopes, slot, z_slot)
    again = backward(given, slopes, slot_of(dtype, 2.0**-3), z_slot)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(gradient, again, strict=True))


@of_kinds
def test_a_row_with_nan_spoils_no_other(kind):
    others = torch.arange(SMALL[0], device=DEVICE) != 77
    good, bad = whole(SMALL), whole(SMALL)
    bad.a[77] = torch.full((SMALL[2],), float("nan"), device=DEVICE).to(E4M3)
    slot, clean = slot_of(E4M3, 8.0), slot_of(E4M3, 8.0)
    want, (q, slopes) = product_activation(kind, good, None, clean), product_activation(kind, bad, None, slot)
    assert torch.all(q.float()[77].isnan())
    if kind == "gelu":
        assert torch.all(slopes[77] == 255)
    assert torch.equal(bits(q[others]), bits(want.q[others]))
    assert torch.equal(bits(slopes[others]), bits(want.slopes[others]))
    h = exact_product(good).float().bfloat16()
    assert slot.amax.item() == pytest.approx(exact_activation(kind, h[others]).abs().max().item(), rel=1e-6)

    # in the gradient that arrives, and with squared ReLU in what is kept of h
    expected = backward(good, want.slopes, slot_of(E5M2, 8.0))
    found = [(bad, want.slopes)] + ([(good, slopes)] if kind == "relu_squared" else [])
    for operands, kept in found:
        slot = slot_of(E5M2, 8.0)
        gradient = backward(operands, kept, slot)
        assert torch.all(gradient.q.float()[77].isnan())
        assert torch.equal(bits(gradient.q[others]), bits(expected.q[others]))
        assert torch.all(column_sums(gradient.sums).isnan())
        exact = exact_product(good) * slope_of(want.slopes)
        assert slot.amax.item() == pytest.approx(exact[others].abs().max().item(), rel=1e-5)


def test_more_elements_than_int32_counts():
    """Also held to the product itself, whose sums of small whole numbers float32 has exactly."""
    kernels.need(40)
    m, n, k, step = 65600, 32896, 128, 13120
    assert m * n > 2**31
    parts = [slice(start, start + step) for start in range(0, m, step)]
    given, bias, slot = whole((m, n, k)), normal(n, seed=2), slot_of(E4M3, 16.0)
    q, slopes = product_activation("gelu", given, bias, slot)
    a, b, *units = given
    weight, largest = b.float().t() * (UNITS[0] * UNITS[1]), []
    for part in parts:
        h = (a[part].float() @ weight + bias.float()).bfloat16()
        assert torch.equal(bits(q[part]), bits(kernels.activation_cast("gelu", h, slot_of(E4M3, 16.0))))
        alone = product_activation("gelu", Operands(a[part], b, *units), bias, slot_of(E4M3, 16.0))
        assert torch.equal(slopes[part], alone.slopes)
        largest.append(h.max().item())
    assert slot.amax.item() == pytest.approx(max(largest), rel=1e-6)  # far from 0, gelu(h) is h
    del q

    a = whole((m, 128, k), E5M2, seed=3).a

    def of_rows(rows, slot):
        q, partial = backward(Operands(a[rows], b, *units), slopes[rows], slot)
        return [q], column_sums(partial)

    kernels.assert_slices_are_alone(of_rows, slot_of(E5M2, 11.3), parts)
