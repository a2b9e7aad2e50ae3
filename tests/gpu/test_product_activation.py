"""Products whose epilogue is GELU, or its derivative, against float64 and the same arithmetic in torch.

Most operands are small whole numbers: every sum of their products is then exact in the tensor cores, which keep some
14 bits of one, so that all that is left to explain is the epilogue's own arithmetic.
"""

import pytest
import torch

from gpt2_fp8.kernels.product import CODE_OF_ZERO, CODES, Operands, fits, product_gelu, product_gelu_backward
from tests.gpu import kernels
from tests.gpu.kernels import DEVICE, E4M3, E5M2, LARGEST, assert_fp8, bits, column_sums, normal, slot_of
from tests.gpu.test_gelu import ABSOLUTE, RELATIVE, exact_backward, exact_gelu
from tests.gpu.test_gemm import operands as normal_operands

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels", "poison")]

# M, N, K, for 132 multiprocessors: one tile; nine; a block with slabs of its own; slabs that blocks share, and blocks
# with two; many blocks to a slab; many tiles to a block
SHAPES = [(64, 128, 128), (192, 384, 256), (64, 38400, 128), (448, 3072, 768), (4160, 640, 1024), (8256, 3072, 768)]
SMALL = (192, 384, 256)
FAST = 1e-2  # fast accumulation's error, relative to what is summed: as in test_gemm
UNITS = 2.0**-4, 2.0**-2  # of whole numbers: what they give is then about 1


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
    return (CODES * exact_backward(torch.ones_like(h, dtype=torch.float64), h)).round() + CODE_OF_ZERO


def assert_codes(slopes, h):
    """Those of float64, but for float32's error where a code is halfway between two."""
    assert slopes.dtype == torch.uint8
    off = (slopes.double() - exact_codes(h)).abs()
    assert off.max() <= 1
    assert torch.count_nonzero(off) <= off.numel() // 1000


def codes_of(h):
    return exact_codes(h).to(torch.uint8)


def slope_of(slopes):
    return (slopes.double() - CODE_OF_ZERO) / CODES


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


def assert_gradient(gradient, operands, slopes, slot):
    """Equal bits, and sums of columns as near as float32's."""
    q, amax, exact = same_arithmetic(operands, slopes, slot)
    assert gradient.q.dtype == slot.dtype
    assert torch.equal(bits(gradient.q), bits(q))
    assert slot.amax.item() == amax
    torch.testing.assert_close(column_sums(gradient.sums), exact.sum(0), rtol=1e-5, atol=3e-3)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, with_bias):
    """q is what the kernel of its own makes of h, to the last bit; so h was rounded to bfloat16."""
    operands, slot, other = whole(shape), slot_of(E4M3, 16.0), slot_of(E4M3, 16.0)
    assert fits(operands.a, operands.b)
    bias = normal(shape[1], seed=2) if with_bias else None
    q, slopes = product_gelu(operands, bias, slot)
    h = (exact_product(operands) + (bias.double() if with_bias else 0)).float().bfloat16()
    assert torch.equal(bits(q), bits(kernels.gelu_cast(h, other)))
    assert slot.amax.item() == pytest.approx(exact_gelu(h).abs().max().item(), rel=1e-6)
    assert other.amax.item() == pytest.approx(slot.amax.item(), rel=1e-6)
    assert_codes(slopes, h)


@pytest.mark.parametrize("scale", kernels.SCALES)
def test_forward_scales(scale):
    operands, bias, slot = whole(SMALL), normal(SMALL[1], seed=2), slot_of(E4M3, scale)
    q, _ = product_gelu(operands, bias, slot)
    exact = exact_gelu((exact_product(operands) + bias.double()).float().bfloat16())
    assert_fp8(q, exact, scale, RELATIVE * exact.abs() + 1e-30)
    assert slot.scale.item() == scale
    if scale == 2.0**16:
        assert torch.any(q.float() == LARGEST[E4M3])
    if scale == 2.0**-16:
        assert torch.count_nonzero(q.float()) == 0


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [SMALL, (448, 3072, 768), (4160, 640, 1024)])
def test_forward_of_normal_numbers(shape, with_bias):
    """Sums that the tensor cores round, units that are no powers of two, a scale that rounds: what they may do to h
    explains every number."""
    a, b, _, *units = normal_operands(*shape)
    operands, slot = Operands(a, b, *units), slot_of(E4M3, 37.3)
    bias = normal(shape[1], seed=2) * 4 if with_bias else None
    q, slopes = product_gelu(operands, bias, slot)
    product = exact_product(operands)
    h = product + (bias.double() if with_bias else 0)
    noise = FAST * (product.abs() + product.square().mean().sqrt()) + 2.0**-8 * h.abs()
    # neither gelu nor gelu' is steeper than 1.13; gelu falls and rises once, gelu' has its largest value between
    assert_fp8(q, exact_gelu(h), slot.scale.double(), 1.13 * noise + ABSOLUTE, most=0.2)
    off = (slope_of(slopes) - exact_backward(torch.ones_like(h), h)).abs()
    assert torch.all(off <= noise + 0.51 / CODES)
    assert off.square().mean().sqrt() < 1 / CODES


@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, dtype):
    """With the forward's own codes: the gradient's cast, its amax and its sums."""
    _, slopes = product_gelu(whole(shape, seed=1), normal(shape[1], seed=2), slot_of(E4M3, 8.0))
    # no power of two: where the derivative is about 1, many whole numbers would lie halfway between two of FP8
    operands, slot = whole(shape, dtype), slot_of(dtype, 11.3)
    assert_gradient(product_gelu_backward(operands, slopes, slot), operands, slopes, slot)


@pytest.mark.parametrize("given", [E5M2, E4M3])
@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("scale", kernels.SCALES)
def test_backward_scales_and_formats(scale, dtype, given):
    operands, slopes, slot = whole(SMALL, given), codes_of(normal(*SMALL[:2], seed=1)), slot_of(dtype, scale)
    assert_gradient(product_gelu_backward(operands, slopes, slot), operands, slopes, slot)


@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("shape", [SMALL, (448, 3072, 768), (4160, 640, 1024)])
def test_backward_of_normal_numbers(shape, dtype):
    """As `test_forward_of_normal_numbers`: what the tensor cores' rounding may do to g explains every number."""
    a, b, _, *units = normal_operands(*shape, (dtype, E4M3))
    operands, h = Operands(a, b, *units), normal(*shape[:2], seed=1) * 2
    slopes, slot = codes_of(h), slot_of(dtype, 37.3)
    q, sums = product_gelu_backward(operands, slopes, slot)
    g, slope = exact_product(operands), slope_of(slopes)
    exact = g * slope
    noise = FAST * (g.abs() + g.square().mean().sqrt()) * slope.abs() + RELATIVE * exact.abs()
    assert_fp8(q, exact, slot.scale.double(), noise, most=0.1)
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=2 * FAST)
    off = (column_sums(sums) - exact.sum(0)).abs()
    assert torch.all(off <= FAST * exact.square().sum(0).sqrt() + FAST / 5 * exact.abs().sum(0))
    # and the codes themselves: what they take from the gradient
    error = g * (slope - exact_backward(torch.ones_like(g), h))
    assert error.norm() < 0.003 * exact.norm()


def test_large_numbers_forward():
    """Far from 0, gelu(h) is h or 0, also where h's square is infinite in float32."""
    bias = torch.zeros(128, device=DEVICE, dtype=torch.bfloat16)
    bias[:6] = torch.tensor([1e4, -1e4, 1e30, -1e30, 3e38, -3e38]).to(bias)
    for columns in (slice(0, 2), slice(0, 6)):
        given = torch.zeros_like(bias)
        given[columns] = bias[columns]
        operands, slot = whole((64, 128, 128)), slot_of(E4M3)
        q, slopes = product_gelu(operands, given, slot)
        h = (exact_product(operands) + given.double()).float().bfloat16()
        large = given.float().abs() > 1e3
        most = torch.where(given > 0, LARGEST[E4M3], 0.0)[large]
        assert torch.equal(q.float()[:, large], most.expand(64, -1))
        assert torch.equal(bits(q), bits(kernels.gelu_cast(h, slot_of(E4M3))))
        assert torch.equal(slope_of(slopes)[:, large], (given > 0).double()[large].expand(64, -1))
        assert slot.amax.item() == h.float().max().item()


def test_saturates_backward():
    operands = whole((64, 128, 128), E5M2)
    operands.a_scale_inv.fill_(2.0**40)
    slopes, slot = codes_of(torch.full((64, 128), 100.0, device=DEVICE)), slot_of(E5M2)
    q, _ = product_gelu_backward(operands, slopes, slot)
    g = exact_product(operands)
    assert torch.equal(q.float(), g.sign().float() * LARGEST[E5M2])
    assert slot.amax.item() == pytest.approx(g.abs().max().item(), rel=1e-6)


def test_a_row_with_nan_spoils_no_other():
    others = torch.arange(SMALL[0], device=DEVICE) != 77
    good, bad = whole(SMALL), whole(SMALL)
    bad.a[77] = torch.full((SMALL[2],), float("nan"), device=DEVICE).to(E4M3)
    slot, clean = slot_of(E4M3, 8.0), slot_of(E4M3, 8.0)
    want, (q, slopes) = product_gelu(good, None, clean), product_gelu(bad, None, slot)
    assert torch.all(q.float()[77].isnan())
    assert torch.all(slopes[77] == 255)
    assert torch.equal(bits(q[others]), bits(want.q[others]))
    assert torch.equal(slopes[others], want.slopes[others])
    h = exact_product(good).float().bfloat16()
    assert slot.amax.item() == pytest.approx(exact_gelu(h[others]).abs().max().item(), rel=1e-6)

    slot = slot_of(E5M2, 8.0)
    expected = product_gelu_backward(good, want.slopes, slot_of(E5M2, 8.0))
    gradient = product_gelu_backward(bad, want.slopes, slot)
    assert torch.all(gradient.q.float()[77].isnan())
    assert torch.equal(bits(gradient.q[others]), bits(expected.q[others]))
    assert torch.all(column_sums(gradient.sums).isnan())
    _, _, exact = same_arithmetic(good, want.slopes, slot)
    assert slot.amax.item() == pytest.approx(exact[others].abs().max().item(), rel=1e-5)


def test_more_elements_than_int32_counts():
    """Also held to the product itself, whose sums of small whole numbers float32 has exactly."""
    kernels.need(40)
    m, n, k, step = 65600, 32896, 128, 13120
    assert m * n > 2**31
    parts = [slice(start, start + step) for start in range(0, m, step)]
    given, bias, slot = whole((m, n, k)), normal(n, seed=2), slot_of(E4M3, 16.0)
    q, slopes = product_gelu(given, bias, slot)
    a, b, *units = given
    weight, largest = b.float().t() * (UNITS[0] * UNITS[1]), []
    for part in parts:
        h = (a[part].float() @ weight + bias.float()).bfloat16()
        assert torch.equal(bits(q[part]), bits(kernels.gelu_cast(h, slot_of(E4M3, 16.0))))
        alone = product_gelu(Operands(a[part], b, *units), bias, slot_of(E4M3, 16.0))
        assert torch.equal(slopes[part], alone.slopes)
        largest.append(h.max().item())
    assert slot.amax.item() == pytest.approx(max(largest), rel=1e-6)  # far from 0, gelu(h) is h
    del q

    a = whole((m, 128, k), E5M2, seed=3).a

    def backward(rows, slot):
        q, partial = product_gelu_backward(Operands(a[rows], b, *units), slopes[rows], slot)
        return [q], column_sums(partial)

    kernels.assert_slices_are_alone(backward, slot_of(E5M2, 11.3), parts)
