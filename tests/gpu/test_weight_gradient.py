"""The weight gradient of which one operand is not transposed, against float64 and cuBLASLt's.

Whole numbers are exact: in the tensor cores, which keep some 14 bits of a block's sums, and in float32 after them.
"""

import pytest
import torch

from gpt2_fp8.kernels.gemm import PAIRS, matmul
from gpt2_fp8.kernels.weight_gradient import weight_gradient
from tests.gpu.kernels import DEVICE, E4M3, E5M2, bits, need

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels", "poison")]

# M, N, D, for 66 clusters: the least; one tile; half a tile; several clusters to a tile; half a block in the end;
# GPT-2 124M's and 355M's shapes; more tiles than clusters
SHAPES = [
    (64, 128, 128), (128, 256, 256), (192, 384, 128), (1024, 512, 256), (4160, 640, 384), (4224, 1024, 512),
    (65536, 3072, 768), (32768, 4096, 1024), (512, 4608, 1280),
]  # fmt: skip
SMALL = (4160, 640, 384)
UNITS = 2.0**-4, 2.0**-2


@pytest.fixture
def processors(monkeypatch):
    """Sets how many multiprocessors there are."""
    from gpt2_fp8.kernels import nvrtc, weight_gradient

    def put(count):
        monkeypatch.setattr(nvrtc, "processors", lambda device: count)
        weight_gradient._work.cache_clear()

    yield put
    weight_gradient._work.cache_clear()


def number(value):
    return torch.tensor([value], device=DEVICE)


def whole(shape, pair=(E5M2, E4M3), seed=0):
    """a [M, N] and bt [D, M] of whole numbers between -3 and 3, and the two scales."""
    (m, n, d), generator = shape, torch.Generator(DEVICE).manual_seed(seed)
    a, bt = (torch.randint(-3, 4, size, device=DEVICE, generator=generator).float() for size in ((m, n), (d, m)))
    return a.to(pair[0]), bt.to(pair[1]), *map(number, UNITS)


def normal(shape, pair, seed=0):
    """Numbers of wide range in E5M2, normal ones in E4M3."""
    (m, n, d), generator = shape, torch.Generator(DEVICE).manual_seed(seed)
    made = []
    for size, dtype in zip(((m, n), (d, m)), pair, strict=True):
        x = torch.randn(size, device=DEVICE, generator=generator)
        if dtype == E5M2:
            x *= torch.randn(size, device=DEVICE, generator=generator).mul_(1.2).exp_()
        made.append((x * ((40000.0 if dtype == E5M2 else 440.0) / x.abs().max())).to(dtype))
    return *made, number(0.3), number(0.07)


def exact(a, bt, a_scale_inv, b_scale_inv, transposed=False):
    """In float64, part by part."""
    total = sum(x.double().t() @ y.double().t() for x, y in zip(a.split(8192), bt.split(8192, 1), strict=True))
    total = total * a_scale_inv.double() * b_scale_inv.double()
    return total.t() if transposed else total


def computed(given, transposed=False, add=None):
    a, bt, *scales = given
    size = (a.shape[1], bt.shape[0])
    out = torch.empty(size[::-1] if transposed else size, device=DEVICE) if add is None else add
    assert weight_gradient(a, bt, out, *scales, transposed=transposed, add=add) is out
    return out


def counting(size):
    """Whole numbers [size], so that what is added to the wrong place shows."""
    return (torch.arange(size[0] * size[1], device=DEVICE) % 101).view(size).float()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_numbers_are_exact(shape, pair, transposed):
    given = whole(shape, pair)
    expected = exact(*given, transposed).float()
    assert torch.equal(computed(given, transposed), expected)
    add, out, (a, bt, *scales) = counting(expected.shape), torch.empty(expected.shape, device=DEVICE), given
    weight_gradient(a, bt, out, *scales, transposed=transposed, add=add)
    assert torch.equal(out, expected + add)
    assert torch.equal(add, counting(expected.shape))
    for _ in range(2):
        assert torch.equal(computed(given, transposed, add=add), expected + counting(expected.shape))
        add.copy_(counting(expected.shape))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [(4160, 640, 384), (16384, 3072, 768)])
def test_is_as_exact_as_cublaslt_with_promotion(shape, pair, transposed):
    given = normal(shape, pair)
    a, bt, *scales = given
    at = a.view(torch.uint8).t().contiguous().view(a.dtype)
    theirs = matmul(at, bt, torch.empty(a.shape[1], bt.shape[0], device=DEVICE), *scales)
    ours, expected = computed(given, transposed), exact(*given)
    ours = ours.t() if transposed else ours
    off, theirs_off = ((result.double() - expected).norm() / expected.norm() for result in (ours, theirs))
    assert off < 1e-3
    assert off < 1.2 * theirs_off + 1e-6
    assert (ours.double() - expected).abs().max() < 4e-3 * expected.abs().max()


@pytest.mark.parametrize("count", [2, 7, 40, 132])
@pytest.mark.parametrize("shape", [(64, 128, 128), (4160, 640, 384), (1024, 2304, 768)])
def test_any_number_of_clusters(shape, count, processors):
    processors(count)
    given = whole(shape)
    for transposed in (False, True):
        assert torch.equal(computed(given, transposed), exact(*given, transposed).float())


def test_repeats():
    given = normal((65536, 3072, 768), (E5M2, E4M3))
    first, *others = (computed(given) for _ in range(4))
    assert all(torch.equal(bits(first), bits(other)) for other in others)


def test_a_nan_spoils_its_row_and_column_alone():
    a, bt, *scales = whole(SMALL)
    a.view(torch.uint8)[4159, 70] = 0x7F  # E5M2's NaN, in the last row
    bt.view(torch.uint8)[300, 0] = 0x7F
    out, wrong = computed((a, bt, *scales)), torch.zeros(640, 384, dtype=torch.bool, device=DEVICE)
    wrong[70], wrong[:, 300] = True, True
    assert torch.equal(out.isnan(), wrong)


def test_two_streams_at_the_same_time():
    """Sums that wait for their owner are each call's own."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    givens = [whole((8192, 1024, 768), seed=seed) for seed in range(2)]
    expected = [exact(*given).float() for given in givens]
    computed(givens[0])
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for stream, given, found in zip(streams, givens, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(computed(given))
    torch.cuda.synchronize()
    for found, right in zip(results, expected, strict=True):
        assert all(torch.equal(out, right) for out in found)


def test_more_elements_than_int32_counts():
    need(16)
    shape = (1_048_640, 2176, 128)
    assert shape[0] * shape[1] > 2**31
    (m, n, d), generator = shape, torch.Generator(DEVICE).manual_seed(0)
    a, bt = torch.empty(m, n, device=DEVICE, dtype=E5M2), torch.empty(d, m, device=DEVICE, dtype=E4M3)
    for to in (a, bt):
        for part in to.split(65536, 0 if to is a else 1):
            part.copy_(torch.randint(-1, 2, part.shape, device=DEVICE, generator=generator).float())
    given = a, bt, number(1.0), number(1.0)
    assert torch.equal(computed(given), exact(*given).float())
