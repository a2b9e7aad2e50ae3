"""Products whose epilogue is GELU, or its derivative, against float64.

Most operands are small whole numbers: every sum of their products is then exact in the tensor cores, which keep some
14 bits of one, so that all that is left to explain is the epilogue's own arithmetic.
"""

import pytest
import torch

from tests.gpu.test_cast import (
    DEVICE,
    LARGEST,
    SCALES,
    assert_fp8,
    assert_repeats,
    assert_slices_are_alone,
    assert_transposed,
    bits,
    column_sums,
    need,
    normal,
    ordinal,
    slot_of,
    to_fp8,
)
from tests.gpu.test_gelu import ABSOLUTE, RELATIVE, exact_backward, exact_gelu
from tests.gpu.test_gemm import assert_near
from tests.gpu.test_gemm import operands as normal_operands

pytestmark = pytest.mark.fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# M, N, K, for 132 multiprocessors: one tile; nine; a block with slabs of its own; slabs that blocks share, and blocks
# with two; many blocks to a slab; many tiles to a block
SHAPES = [(64, 128, 128), (192, 384, 256), (64, 38400, 128), (448, 3072, 768), (4160, 640, 1024), (8256, 3072, 768)]
SMALL = (192, 384, 256)
FAST = 1e-2  # fast accumulation's error, relative to what is summed: as in test_gemm
UNITS = 2.0**-4, 2.0**-2  # of whole numbers: what they give is then about 1


@pytest.fixture(autouse=True)
def _hopper():
    from gpt2_fp8.kernels import nvrtc

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for Hopper")
    if reason := nvrtc.missing():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Memory that is asked for without values is full of NaN, so that what is not written shows."""
    empty = torch.empty

    def poisoned(*size, **options):
        out = empty(*size, **options)
        if out.is_cuda and out.dim():
            out.view(torch.uint8).fill_(0xFF)
        return out

    monkeypatch.setattr(torch, "empty", poisoned)


def whole(shape, dtype=E4M3, seed=0):
    """Operands of whole numbers between -3 and 3, a's format given."""
    from gpt2_fp8.kernels.product_gelu import Operands

    m, n, k = shape
    generator = torch.Generator(DEVICE).manual_seed(seed)
    a, b = (torch.randint(-3, 4, (rows, k), device=DEVICE, generator=generator).float() for rows in (m, n))
    return Operands(a.to(dtype), b.to(E4M3), *(torch.tensor([unit], device=DEVICE) for unit in UNITS))


def exact_product(operands):
    """a b^T in float64."""
    a, b, *units = operands
    return a.double() @ b.double().t() * units[0].double() * units[1].double()


def assert_gradient(gradient, g, h, scale, dtype):
    """q, its transpose and the sums, g (float64) being exact."""
    exact = exact_backward(g, h)
    assert gradient.q.dtype == dtype
    assert_fp8(gradient.q, exact, scale, RELATIVE * exact.abs() + ABSOLUTE * g.abs())
    assert_transposed(gradient.q, gradient.qt)
    torch.testing.assert_close(column_sums(gradient.sums), exact.sum(0), rtol=1e-5, atol=3e-3)
    return exact


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, with_bias):
    """h is the product to the last bit, and q what the kernel of its own makes of it."""
    from gpt2_fp8.kernels.gelu import gelu_cast
    from gpt2_fp8.kernels.product_gelu import fits, product_gelu

    operands, slot, other = whole(shape), slot_of(E4M3, 16.0), slot_of(E4M3, 16.0)
    assert fits(operands.a, operands.b)
    bias = normal(shape[1], seed=2) if with_bias else None
    h, q = product_gelu(operands, bias, slot)
    exact = exact_product(operands) + (bias.double() if with_bias else 0)
    assert h.dtype == torch.bfloat16
    assert torch.equal(h, exact.float().bfloat16())
    assert torch.equal(bits(q), bits(gelu_cast(h, other)))
    assert slot.amax.item() == pytest.approx(exact_gelu(h).abs().max().item(), rel=1e-6)
    assert other.amax.item() == pytest.approx(slot.amax.item(), rel=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_forward_scales(scale):
    from gpt2_fp8.kernels.product_gelu import product_gelu

    slot = slot_of(E4M3, scale)
    h, q = product_gelu(whole(SMALL), normal(SMALL[1], seed=2), slot)
    exact = exact_gelu(h)
    assert_fp8(q, exact, scale, RELATIVE * exact.abs() + 1e-30)
    assert slot.scale.item() == scale
    if scale == 2.0**16:
        assert torch.any(q.float() == LARGEST[E4M3])
    if scale == 2.0**-16:
        assert torch.count_nonzero(q.float()) == 0


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [SMALL, (448, 3072, 768), (4160, 640, 1024)])
def test_forward_of_normal_numbers(shape, with_bias):
    """Sums that the tensor cores round, units that are no powers of two, a scale that rounds."""
    from gpt2_fp8.kernels.gelu import gelu_cast
    from gpt2_fp8.kernels.product_gelu import Operands, product_gelu

    a, b, _, *units = normal_operands(*shape)
    operands = Operands(a, b, *units)
    bias = normal(shape[1], seed=2) * 4 if with_bias else None
    h, q = product_gelu(operands, bias, slot_of(E4M3, 37.3))
    assert_near(h, exact_product(operands) + (bias.double() if with_bias else 0), fast=True)
    assert torch.equal(bits(q), bits(gelu_cast(h, slot_of(E4M3, 37.3))))


@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, dtype):
    """The gradient's cast and sums; and gelu(h) transposed, byte for byte what the forward's cast was."""
    from gpt2_fp8.kernels.product_gelu import product_gelu, product_gelu_backward

    h, y = product_gelu(whole(shape, seed=1), normal(shape[1], seed=2), slot_of(E4M3, 8.0))
    # no power of two: where the derivative is about 1, many whole numbers would lie halfway between two of FP8
    operands, slot, slot_y = whole(shape, dtype), slot_of(dtype, 11.3), slot_of(E4M3, 8.0, amax=0.5)
    gradient = product_gelu_backward(operands, h, slot, slot_y)
    exact = assert_gradient(gradient, exact_product(operands), h, slot.scale.double(), dtype)
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=1e-5)
    assert_transposed(y, gradient.yt)
    assert slot_y.amax.item() == 0.5  # the forward's to record


@pytest.mark.parametrize("given", [E5M2, E4M3])
@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("scale", SCALES)
def test_backward_scales_and_formats(scale, dtype, given):
    from gpt2_fp8.kernels.product_gelu import product_gelu_backward

    operands, h = whole(SMALL, given), normal(*SMALL[:2], seed=1)
    gradient = product_gelu_backward(operands, h, slot_of(dtype, scale), slot_of(E4M3))
    assert_gradient(gradient, exact_product(operands), h, scale, dtype)


@pytest.mark.parametrize("dtype", [E5M2, E4M3])
@pytest.mark.parametrize("shape", [SMALL, (448, 3072, 768), (4160, 640, 1024)])
def test_backward_of_normal_numbers(shape, dtype):
    """As `test_forward_of_normal_numbers`: what the tensor cores' rounding may do to g explains every number."""
    from gpt2_fp8.kernels.product_gelu import Operands, product_gelu_backward

    a, b, _, *units = normal_operands(*shape, (dtype, E4M3))
    operands, h = Operands(a, b, *units), normal(*shape[:2], seed=1) * 2
    slot = slot_of(dtype, 37.3)
    q, qt, _, sums = product_gelu_backward(operands, h, slot, slot_of(E4M3))
    g = exact_product(operands)
    exact, slope = exact_backward(g, h), exact_backward(torch.ones_like(g), h)
    noise = FAST * (g.abs() + g.square().mean().sqrt()) * slope.abs() + RELATIVE * exact.abs() + ABSOLUTE * g.abs()
    scale, got = slot.scale.double(), ordinal(q)
    low, high = (ordinal(to_fp8(exact + sign * noise, scale, dtype)) for sign in (-1, 1))
    assert torch.all((low <= got) & (got <= high))
    assert (got != ordinal(to_fp8(exact, scale, dtype))).sum().item() < exact.numel() // 10
    assert_transposed(q, qt)
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=2 * FAST)
    off = (column_sums(sums) - exact.sum(0)).abs()
    assert torch.all(off <= FAST * exact.square().sum(0).sqrt() + FAST / 5 * exact.abs().sum(0))


@pytest.mark.parametrize("shape", [(448, 3072, 768), (4160, 640, 1024)])
def test_each_block_has_its_part_of_the_sums(shape):
    """Part by part: the rows that a block has of a slab; zeros where there are fewer blocks than parts."""
    from gpt2_fp8.kernels import nvrtc
    from gpt2_fp8.kernels.product_gelu import product_gelu_backward

    m, n, _ = shape
    operands, h = whole(shape, E5M2), normal(m, n, seed=1)
    sums = product_gelu_backward(operands, h, slot_of(E5M2), slot_of(E4M3)).sums
    down = m // 64
    tiles = down * (n // 128)
    grid = min(nvrtc.processors(h.device), tiles)
    expected, exact = torch.zeros_like(sums, dtype=torch.float64), exact_backward(exact_product(operands), h)
    counts = [0] * (n // 128)
    for block in range(grid):
        own = range(block * tiles // grid, (block + 1) * tiles // grid)
        for slab in sorted({tile // down for tile in own}):
            rows = [tile % down * 64 for tile in own if tile // down == slab]
            columns = slice(slab * 128, slab * 128 + 128)
            expected[counts[slab], columns] = exact[rows[0] : rows[-1] + 64, columns].sum(0)
            counts[slab] += 1
    assert len(sums) == max(counts)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.equal(sums == 0, expected == 0)


def test_large_numbers_forward():
    """Far from 0, gelu(h) is h or 0, also where h's square is infinite in float32."""
    from gpt2_fp8.kernels.gelu import gelu_cast
    from gpt2_fp8.kernels.product_gelu import product_gelu

    bias = torch.zeros(128, device=DEVICE, dtype=torch.bfloat16)
    bias[:6] = torch.tensor([1e4, -1e4, 1e30, -1e30, 3e38, -3e38]).to(bias)
    for columns in (slice(0, 2), slice(0, 6)):
        given = torch.zeros_like(bias)
        given[columns] = bias[columns]
        slot = slot_of(E4M3)
        h, q = product_gelu(whole((64, 128, 128)), given, slot)
        large = given.float().abs() > 1e3
        most = torch.where(given > 0, LARGEST[E4M3], 0.0)[large]
        assert torch.equal(q.float()[:, large], most.expand(64, -1))
        assert torch.equal(bits(q), bits(gelu_cast(h, slot_of(E4M3))))
        assert slot.amax.item() == h.float().max().item()


@pytest.mark.parametrize("dtype", [E5M2, E4M3])
def test_large_numbers_backward(dtype):
    """Far from 0 the derivative is 1 or 0, and nothing is NaN."""
    from gpt2_fp8.kernels.gelu import gelu_cast
    from gpt2_fp8.kernels.product_gelu import product_gelu_backward

    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([1e4, -1e4, 1e30, -1e30, largest, -largest, 100.0, -100.0])
    h = values.to(DEVICE, torch.bfloat16).repeat(64, 16)
    operands, slot = whole((64, 128, 128), dtype), slot_of(dtype, 16.0)
    gradient = product_gelu_backward(operands, h, slot, slot_of(E4M3))
    g = exact_product(operands)
    slope = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], device=DEVICE).repeat(64, 16)
    assert torch.equal(gradient.q.float(), to_fp8(g * slope, 16.0, dtype).float())
    assert slot.amax.item() == (g * slope).abs().max().item()
    assert_transposed(gelu_cast(h, slot_of(E4M3)), gradient.yt)


def test_saturates_backward():
    from gpt2_fp8.kernels.product_gelu import product_gelu_backward

    operands = whole((64, 128, 128), E5M2)
    operands.a_scale_inv.fill_(2.0**40)
    h, slot = torch.full((64, 128), 100.0, device=DEVICE, dtype=torch.bfloat16), slot_of(E5M2)
    q, qt, _, _ = product_gelu_backward(operands, h, slot, slot_of(E4M3))
    g = exact_product(operands)
    assert torch.equal(q.float(), g.sign().float() * LARGEST[E5M2])
    assert_transposed(q, qt)
    assert slot.amax.item() == g.abs().max().item()


def test_a_row_with_nan_spoils_no_other():
    from gpt2_fp8.kernels.product_gelu import product_gelu, product_gelu_backward

    others = torch.arange(SMALL[0], device=DEVICE) != 77
    good, bad = whole(SMALL), whole(SMALL)
    bad.a[77] = torch.full((SMALL[2],), float("nan"), device=DEVICE).to(E4M3)
    slot = slot_of(E4M3, 8.0)
    want, (h, q) = product_gelu(good, None, slot_of(E4M3, 8.0)), product_gelu(bad, None, slot)
    for got, expected in zip((h, q), want, strict=True):
        assert torch.all(got.float()[77].isnan())
        assert torch.equal(got.float()[others], expected.float()[others])
    assert slot.amax.item() == pytest.approx(exact_gelu(want[0][others]).abs().max().item(), rel=1e-6)

    slot, h = slot_of(E5M2, 8.0), want[0]
    expected = product_gelu_backward(good, h, slot_of(E5M2, 8.0), slot_of(E4M3))
    gradient = product_gelu_backward(bad, h, slot, slot_of(E4M3))
    assert torch.all(gradient.q.float()[77].isnan())
    assert torch.equal(gradient.q.float()[others], expected.q.float()[others])
    assert_transposed(gradient.q, gradient.qt)
    assert torch.equal(bits(gradient.yt), bits(expected.yt))
    exact = exact_backward(exact_product(good), h)[others]
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=1e-5)


def test_nan_in_h_stays_alone():
    from gpt2_fp8.kernels.product_gelu import product_gelu_backward

    h = normal(*SMALL[:2])
    h[70, 200] = h[0, 0] = h[-1, -1] = float("nan")
    gradient = product_gelu_backward(whole(SMALL), h, slot_of(E5M2), slot_of(E4M3))
    assert torch.equal(gradient.q.float().isnan(), h.isnan())
    assert torch.equal(gradient.yt.float().isnan(), h.isnan().t())
    assert_transposed(gradient.q, gradient.qt)
    assert torch.equal(column_sums(gradient.sums).isnan(), h.isnan().any(0))


def test_amax_is_raised_and_not_replaced():
    from gpt2_fp8.kernels.product_gelu import product_gelu, product_gelu_backward

    h = normal(*SMALL[:2])

    def backward(operands, slot):
        product_gelu_backward(operands, h, slot, slot_of(E4M3))

    for call in (lambda operands, slot: product_gelu(operands, None, slot), backward):
        operands, slot = whole(SMALL), slot_of(E4M3, amax=1000.0)
        call(operands, slot)
        assert slot.amax.item() == 1000.0
        operands.a_scale_inv.fill_(2.0**12)
        call(operands, slot)
        assert slot.amax.item() > 1000.0


@pytest.mark.parametrize("shape", [(64, 128, 128), (448, 3072, 768), (4160, 640, 1024)])
def test_repeats(shape):
    from gpt2_fp8.kernels.product_gelu import Operands, product_gelu, product_gelu_backward

    a, b, _, *units = normal_operands(*shape)
    operands, h, bias = Operands(a, b, *units), normal(*shape[:2]), normal(shape[1], seed=2)
    gradient_operands = Operands(a.float().to(E5M2), b, *units)
    assert_repeats(lambda slot: product_gelu(operands, bias, slot), E4M3)
    assert_repeats(lambda slot: product_gelu_backward(gradient_operands, h, slot, slot_of(E4M3)), E5M2)


def test_graph_replay_equals_eager():
    from gpt2_fp8.kernels.product_gelu import product_gelu, product_gelu_backward

    shape = (448, 3072, 768)
    forward, backward, bias = whole(shape), whole(shape, E5M2, seed=1), normal(shape[1])
    slots = slot_of(E4M3, 8.0), slot_of(E5M2, 16.0)

    def both():
        h, q = product_gelu(forward, bias, slots[0])
        return h, q, *product_gelu_backward(backward, h, slots[1], slots[0]), *(slot.amax for slot in slots)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = both()
    for seed in (3, 5):
        for given, fresh in zip(
            (forward, backward), (whole(shape, E4M3, seed), whole(shape, E5M2, seed + 1)), strict=True
        ):
            for ours, theirs in zip(given, fresh, strict=True):
                ours.copy_(theirs)
        slots[0].scale.fill_(float(seed))
        for slot in slots:
            slot.amax.zero_()
        eager = [tensor.clone() for tensor in both()]
        for slot in slots:
            slot.amax.zero_()
        graph.replay()
        for one, other in zip(replayed, eager, strict=True):
            assert torch.equal(bits(one), bits(other))
        assert torch.equal(eager[0], (exact_product(forward) + bias.double()).float().bfloat16())


def test_on_another_stream():
    from gpt2_fp8.kernels.product_gelu import product_gelu

    operands = whole(SMALL)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        h, _ = product_gelu(operands, None, slot_of(E4M3))
    stream.synchronize()
    assert torch.equal(h, exact_product(operands).float().bfloat16())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        *((shape, True) for shape in SHAPES),
        *(((128, 128, k), False) for k in (64, 192, 1280, 1600)),
        *(((m, 128, 128), False) for m in (16, 96)),
        *(((128, n, 128), False) for n in (64, 192)),
    ],
)
def test_what_fits(shape, expected):
    from gpt2_fp8.kernels.product_gelu import fits

    m, n, k = shape
    a, b = (torch.empty(rows, k, device=DEVICE, dtype=E4M3) for rows in (m, n))
    assert fits(a, b) is expected


def test_more_elements_than_int32_counts():
    """Also held to the product itself, whose sums of small whole numbers float32 has exactly."""
    from gpt2_fp8.kernels.gelu import gelu_cast
    from gpt2_fp8.kernels.product_gelu import Operands, product_gelu, product_gelu_backward

    need(40)
    m, n, k, step = 65600, 32896, 128, 13120
    assert m * n > 2**31
    parts = [slice(start, start + step) for start in range(0, m, step)]
    given, bias, slot = whole((m, n, k)), normal(n, seed=2), slot_of(E4M3, 16.0)
    h, q = product_gelu(given, bias, slot)
    a, b, *units = given
    weight = b.float().t() * (UNITS[0] * UNITS[1])
    for part in parts:
        assert torch.equal(h[part], (a[part].float() @ weight + bias.float()).bfloat16())
        assert torch.equal(bits(q[part]), bits(gelu_cast(h[part], slot_of(E4M3, 16.0))))
    assert slot.amax.item() == pytest.approx(h.max().item(), rel=1e-6)  # far from 0, gelu(h) is h
    del q

    a = whole((m, 128, k), E5M2, seed=3).a
    slot, of_parts, sums = slot_of(E5M2, 11.3), slot_of(E5M2, 11.3), []

    def backward(rows, slot):
        operands = Operands(a[rows], b, *units)
        *tensors, partial = product_gelu_backward(operands, h[rows], slot, slot_of(E4M3, 16.0))
        sums.append(column_sums(partial))
        return tensors

    of_all = backward(slice(None), slot)
    assert_slices_are_alone(of_all, lambda part: backward(part, of_parts), parts, transposed=(1, 2))
    assert slot.amax.item() == of_parts.amax.item() > 0
    torch.testing.assert_close(sums[0], sum(sums[1:]), rtol=1e-5, atol=1e-2)
