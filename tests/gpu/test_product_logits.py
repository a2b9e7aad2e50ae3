"""Logits and their softmax's statistics from one product, against float64 and the kernel that reads the logits."""

import pytest
import torch

from tests.gpu.kernels import need, product_logits, softmax_statistics
from tests.gpu.test_product_activation import UNITS, exact_product, whole

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels")]

# M, N, K, columns that count
CASES = [
    (64, 128, 128, 128), (192, 384, 256, 300), (64, 38400, 128, 38291), (448, 3072, 768, 3072), (4160, 640, 1024, 513),
    (8256, 3072, 768, 3001),
]  # fmt: skip


def targets_of(m, vocab_size):
    targets = torch.randint(vocab_size, (m,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    targets[::7] = -1
    return targets


@pytest.mark.parametrize("case", CASES)
def test_matches_float64(case):
    *shape, vocab_size = case
    operands, targets = whole(shape), targets_of(shape[0], vocab_size)
    logits, losses, exponents = product_logits(operands, targets, vocab_size)
    assert torch.equal(logits, exact_product(operands).float().bfloat16())
    counted = targets >= 0
    x = logits.double()[:, :vocab_size]
    expected = torch.nn.functional.cross_entropy(x, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(exponents[counted, 0].double(), x.amax(1)[counted])
    assert torch.count_nonzero(losses[~counted]) == 0
    assert torch.all(exponents[~counted] == torch.tensor([0.0, float("inf")], device="cuda"))
    others = softmax_statistics(logits, targets, vocab_size)
    torch.testing.assert_close(losses, others[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(exponents, others[1], rtol=1e-6, atol=2e-6)


def test_a_nan_spoils_its_row_alone():
    operands, targets = whole((192, 384, 256)), torch.zeros(192, dtype=torch.int64, device="cuda")
    one = product_logits(operands, targets, 300)
    operands.a.view(torch.uint8)[5, 3] = 0x7F  # E4M3's NaN
    logits, losses, _ = product_logits(operands, targets, 300)
    spoilt = torch.arange(192, device="cuda") == 5
    assert torch.equal(losses.isnan(), spoilt)
    assert torch.equal(losses[~spoilt], one[1][~spoilt])
    assert torch.all(logits[5].isnan())


def test_more_elements_than_int32_counts():
    """As many rows as a head has never at once (it goes by chunks), and GPT-2's vocabulary. Held to the product itself,
    whose sums of small whole numbers float32 has exactly, and to the kernel that reads the logits."""
    need(24)
    m, n, k, vocab_size = 65600, 50304, 128, 50257
    assert m * n > 2**31
    operands, targets = whole((m, n, k)), targets_of(m, vocab_size)
    logits, losses, exponents = product_logits(operands, targets, vocab_size)
    weight = operands.b.float().t() * (UNITS[0] * UNITS[1])
    for start in range(0, m, 8200):
        part = slice(start, start + 8200)
        assert torch.equal(logits[part], (operands.a[part].float() @ weight).bfloat16())
    others = softmax_statistics(logits, targets, vocab_size)
    torch.testing.assert_close(losses, others[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(exponents, others[1], rtol=1e-6, atol=2e-6)
    last = slice(-64, None)
    exact = logits[last].double()[:, :vocab_size]
    expected = torch.nn.functional.cross_entropy(exact, targets[last], ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses[last].double(), expected, rtol=2e-6, atol=2e-6)
