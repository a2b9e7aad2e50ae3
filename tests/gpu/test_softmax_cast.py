"""The softmax's gradient in FP8, and the losses, against float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.test_cast import DEVICE, FORMATS, LARGEST, assert_fp8, assert_transposed, bits, normal

pytestmark = pytest.mark.fp8

# rows, vocabulary, columns: without padding and with; padding of whole tiles; a block's multiple and one more
SHAPES = [
    (16, 1, 16),
    (128, 128, 128),
    (48, 257, 400),
    (80, 1000, 1280),
    (272, 144, 144),
    (16, 8192, 8192),
    (16, 8193, 8320),
    (48, 50257, 50304),
]


def targets_of(rows, vocab_size):
    """Random targets [rows], every third ignored; the first counted one is the last column of the vocabulary."""
    targets = torch.randint(0, vocab_size, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[::3] = -1
    targets[1] = vocab_size - 1
    return targets.to(DEVICE)


def reference(logits, targets, vocab_size):
    """Losses, softmax and gradient of each row in float64; padded columns and ignored rows give 0."""
    exact = logits.double()[:, :vocab_size]
    losses = F.cross_entropy(exact, targets, ignore_index=-1, reduction="none")
    counted = targets >= 0
    p, onehot = (torch.zeros(logits.shape, dtype=torch.float64, device=logits.device) for _ in range(2))
    p[counted, :vocab_size] = exact.softmax(1)[counted]
    onehot[counted, targets[counted]] = 1
    return losses, p, p - onehot


def compute(logits, targets, vocab_size, dtype):
    from gpt2_fp8.kernels.softmax_cast import softmax_gradient_cast, softmax_statistics

    losses, exponents = softmax_statistics(logits, targets, vocab_size)
    return losses, exponents, *softmax_gradient_cast(logits, targets, exponents, vocab_size, dtype)


def assert_gradient(q, logits, p, exact):
    """The exponent x log2(e) is rounded by float32, which its magnitude worsens; so is p where 1 is taken from it."""
    from gpt2_fp8.kernels.softmax_cast import GRADIENT_SCALE

    finite = logits.double().abs().nan_to_num(0, 0, 0).amax()
    noise = p * 2.0**-22 * (4 + finite) + torch.where(exact < 0, 2.0**-22, 0.0)
    assert_fp8(q, exact, GRADIENT_SCALE[q.dtype], noise)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("spread", [1.0, 20.0])
@pytest.mark.parametrize(("rows", "vocab_size", "columns"), SHAPES)
def test_matches_float64(rows, vocab_size, columns, spread, dtype):
    from gpt2_fp8.kernels.softmax_cast import GRADIENT_SCALE

    logits = normal(rows, columns) * spread
    logits[:, vocab_size:] = float("nan")  # takes no part
    targets = targets_of(rows, vocab_size)
    losses, exponents, q, qt = compute(logits, targets, vocab_size, dtype)
    want, p, exact = reference(logits, targets, vocab_size)
    torch.testing.assert_close(losses.double(), want, rtol=4e-6, atol=1e-5)
    counted = targets >= 0
    log_sum = logits.double()[:, :vocab_size].logsumexp(1) / torch.tensor(2.0).double().log()
    torch.testing.assert_close(exponents.double()[counted], log_sum[counted], rtol=4e-7, atol=4e-6)
    assert torch.all(exponents[~counted] == float("inf"))
    assert_gradient(q, logits, p, exact)
    assert_transposed(q, qt)
    assert torch.count_nonzero(q.float()[:, vocab_size:]) == 0
    assert torch.count_nonzero(q.float()[~counted]) == 0
    # a row's gradient sums to 0 but for what the cast rounds: half a unit in the last place of each
    got = q.double() / GRADIENT_SCALE[dtype]
    half = 2.0**-4 if dtype == torch.float8_e4m3fn else 2.0**-3
    smallest = (2.0**-10 if dtype == torch.float8_e4m3fn else 2.0**-17) / GRADIENT_SCALE[dtype]
    assert torch.all(got.sum(1).abs() <= half * exact.abs().sum(1) + smallest * vocab_size + 1e-4)


@pytest.mark.parametrize("dtype", FORMATS)
def test_extreme_logits(dtype):
    logits = torch.zeros(16, 400, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.full((16,), 7, device=DEVICE)
    logits[0, 5] = 3e4
    logits[1, 7] = 3e4
    logits[2] = -3e4
    logits[3, :200], logits[3, 200:] = 3e4, -3e4
    logits[4, ::2] = -float("inf")
    logits[5] = -float("inf")
    logits[5, 7] = 0.0
    logits[6, :256] = -float("inf")  # whole tiles
    logits[6, 7] = 1.0
    logits[7, 10], logits[7, 11] = -3e4, 3e4
    logits[:, 257:] = 3e4  # padding larger than all else
    losses, _, q, qt = compute(logits, targets, 257, dtype)
    want, p, exact = reference(logits, targets, 257)
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    assert not q.float().isnan().any()
    assert_gradient(q, logits, p, exact)
    assert_transposed(q, qt)
    assert torch.count_nonzero(q.float()[:, 257:]) == 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_ignored_is_zero(dtype):
    logits = normal(48, 400) * 100
    losses, _, q, qt = compute(logits, torch.full((48,), -1, device=DEVICE), 257, dtype)
    assert torch.count_nonzero(losses) == 0
    assert torch.count_nonzero(q.float()) == torch.count_nonzero(qt.float()) == 0


def test_a_nan_spoils_its_row_alone():
    logits = normal(48, 400)
    logits[17, 100] = float("nan")
    targets = torch.zeros(48, dtype=torch.long, device=DEVICE)
    losses, _, q, _ = compute(logits, targets, 257, torch.float8_e5m2)
    bad = torch.arange(48, device=DEVICE) == 17
    assert torch.equal(losses.isnan(), bad)
    assert torch.equal(q.float().isnan().any(1), bad)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_certain_wrong_answer_is_the_scale(dtype):
    """p = 1 beside the target and 0 on it: plus and minus the scale, which the format holds exactly."""
    from gpt2_fp8.kernels.softmax_cast import GRADIENT_SCALE

    logits = torch.full((16, 144), -200.0, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 143] = 200.0
    _, _, q, _ = compute(logits, torch.zeros(16, dtype=torch.long, device=DEVICE), 144, dtype)
    assert GRADIENT_SCALE[dtype] < LARGEST[dtype]
    assert torch.all(q[:, 0].float() == -GRADIENT_SCALE[dtype])
    assert torch.all(q[:, 143].float() == GRADIENT_SCALE[dtype])
    assert torch.count_nonzero(q.float()) == 32


def test_logits_and_targets_are_left_alone():
    logits, targets = normal(48, 400), targets_of(48, 257)
    before = logits.clone(), targets.clone()
    compute(logits, targets, 257, torch.float8_e5m2)
    assert torch.equal(logits, before[0])
    assert torch.equal(targets, before[1])


@pytest.mark.parametrize("dtype", FORMATS)
def test_repeats(dtype):
    logits, targets = normal(272, 1280), targets_of(272, 1000)
    for one, other in zip(*(compute(logits, targets, 1000, dtype) for _ in range(2)), strict=True):
        assert torch.equal(bits(one), bits(other))
