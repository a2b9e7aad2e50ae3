"""The softmax's gradient in FP8, and the losses, against float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.kernels.formats import LOGITS_EXPONENT
from tests.gpu import kernels
from tests.gpu.kernels import DEVICE, assert_fp8, assert_transposed, normal, softmax_gradient_cast, softmax_statistics

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels")]

SCALE = 2.0**LOGITS_EXPONENT  # of the gradient, which is E5M2

# rows, vocabulary, columns: without padding and with; padding of whole tiles; a block's multiple and one more;
# partial tiles in both directions, and more tiles below each other than run together, the last ones fewer
SHAPES = [
    (16, 1, 16), (128, 128, 128), (48, 257, 400), (80, 1000, 1280), (272, 144, 144), (16, 8192, 8192),
    (16, 8193, 8320), (48, 50257, 50304), (144, 100, 112), (1296, 259, 272),
]  # fmt: skip


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


def compute(logits, targets, vocab_size):
    losses, exponents = softmax_statistics(logits, targets, vocab_size)
    return losses, exponents, *softmax_gradient_cast(logits, targets, exponents, vocab_size)


def assert_gradient(q, logits, p, exact):
    """The exponent x log2(e) is rounded by float32, which its magnitude worsens; so is p where 1 is taken from it."""
    finite = logits.double().abs().nan_to_num(0, 0, 0).amax()
    noise = p * 2.0**-22 * (4 + finite) + torch.where(exact < 0, 2.0**-22, 0.0)
    assert_fp8(q, exact, SCALE, noise)


@pytest.mark.parametrize("spread", [1.0, 20.0])
@pytest.mark.parametrize(("rows", "vocab_size", "columns"), SHAPES)
def test_matches_float64(rows, vocab_size, columns, spread):
    logits = normal(rows, columns) * spread
    logits[:, vocab_size:] = float("nan")  # takes no part
    targets = targets_of(rows, vocab_size)
    losses, exponents, q, qt = compute(logits, targets, vocab_size)
    want, p, exact = reference(logits, targets, vocab_size)
    torch.testing.assert_close(losses.double(), want, rtol=4e-6, atol=1e-5)
    counted = targets >= 0
    log_sum = logits.double()[:, :vocab_size].logsumexp(1) / torch.tensor(2.0).double().log()
    maximum, total = exponents[:, 0], exponents[:, 1]
    assert torch.equal(maximum[counted], logits[counted, :vocab_size].float().amax(1))
    got = maximum.double() / math.log(2) + total.double()
    torch.testing.assert_close(got[counted], log_sum[counted], rtol=4e-7, atol=4e-6)
    assert torch.all(total[~counted] == float("inf"))
    assert_gradient(q, logits, p, exact)
    assert_transposed(q, qt)
    assert (torch.count_nonzero(q.float()[:, vocab_size:]), torch.count_nonzero(q.float()[~counted])) == (0, 0)
    # a row's gradient sums to 0 but for what the cast rounds: half a unit in the last place of each
    got = q.double() / SCALE
    smallest = 2.0**-17 / SCALE
    assert torch.all(got.sum(1).abs() <= 2.0**-3 * exact.abs().sum(1) + smallest * vocab_size + 1e-4)


def test_extreme_logits():
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
    losses, _, q, qt = compute(logits, targets, 257)
    want, p, exact = reference(logits, targets, 257)
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    assert not q.float().isnan().any()
    assert_gradient(q, logits, p, exact)
    assert_transposed(q, qt)
    assert torch.count_nonzero(q.float()[:, 257:]) == 0


def test_all_ignored_is_zero():
    logits = normal(48, 400) * 100
    logits[17, :300] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=DEVICE).repeat(100)
    losses, _, q, qt = compute(logits, torch.full((48,), -1, device=DEVICE), 257)
    assert torch.count_nonzero(losses) == 0
    assert torch.count_nonzero(q.float()) == torch.count_nonzero(qt.float()) == 0


def test_a_nan_spoils_its_row_alone():
    logits = normal(48, 400)
    logits[17, 100] = float("nan")
    losses, _, q, _ = compute(logits, torch.zeros(48, dtype=torch.long, device=DEVICE), 257)
    bad = torch.arange(48, device=DEVICE) == 17
    assert torch.equal(losses.isnan(), bad)
    assert torch.equal(q.float().isnan().any(1), bad)
    assert torch.count_nonzero(q.float()[:, 257:].nan_to_num(1.0)) == 0


def test_a_certain_wrong_answer_is_the_scale():
    """p = 1 beside the target and 0 on it: plus and minus the scale, which the format holds exactly."""
    logits = torch.full((16, 144), -200.0, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 143] = 200.0
    _, _, q, _ = compute(logits, torch.zeros(16, dtype=torch.long, device=DEVICE), 144)
    assert torch.all(q[:, 0].float() == -SCALE)
    assert torch.all(q[:, 143].float() == SCALE)
    assert torch.count_nonzero(q.float()) == 32


def test_a_large_maximum_costs_no_precision():
    """Logits that differ from others by a number that bfloat16 and float32 hold exactly give the same bytes."""
    logits = (normal(48, 400) * 4).round()
    targets = targets_of(48, 257)
    logits[1::2].scatter_(1, targets[1::2, None].clamp_min(0), 40.0)  # p is all but 1: what is left of p - 1 shows it
    _, _, want, _ = compute(logits, targets, 257)
    raised = logits + 128
    assert torch.equal(raised - 128, logits)
    _, _, q, qt = compute(raised, targets, 257)
    assert torch.equal(kernels.bits(q), kernels.bits(want))
    assert_transposed(q, qt)


def test_a_target_anywhere_in_a_tile():
    """Rows whose targets follow each other through all columns: the gradient is negative there and nowhere else."""
    logits, targets = normal(400, 400), torch.arange(400, device=DEVICE)
    _, _, q, qt = compute(logits, targets, 400)
    assert torch.equal(q.float() < 0, torch.eye(400, dtype=torch.bool, device=DEVICE))
    assert_transposed(q, qt)


def test_more_elements_than_int32_counts():
    kernels.need(16)
    m, n, vocab_size = 65552, 32784, 32769
    assert m * n > 2**31
    logits = torch.full((m, n), -200.0, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 5] = logits[-16:, vocab_size - 1] = 200.0
    _, _, q, qt = compute(logits, torch.full((m,), vocab_size - 2, device=DEVICE), vocab_size)
    assert torch.all(q[:-16, 5].float() == SCALE)
    assert torch.all(q[-16:, 5].float() == SCALE / 2)
    assert torch.all(q[-16:, vocab_size - 1].float() == SCALE / 2)
    assert torch.all(q[:, vocab_size - 2].float() == -SCALE)
    assert torch.count_nonzero(q.view(torch.uint8)) == 2 * m + 16
    assert torch.equal(qt.view(torch.uint8), q.view(torch.uint8).t())
