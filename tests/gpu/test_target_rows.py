"""What the head's FP8 gradient lacks at its targets, against float64."""

import pytest
import torch

from tests.gpu.common import hopper
from tests.gpu.kernels import softmax_gradient_cast, softmax_statistics, target_rows
from tests.gpu.test_product_gelu import bits

pytestmark = [pytest.mark.fp8, hopper]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FACTOR = 2.0**15


def case(rows=144, columns=400, vocab_size=385, d=272, z_loss=0.0):
    generator = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(shape, device="cuda", generator=generator)  # noqa: E731
    logits, targets = (normal(rows, columns) * 4).bfloat16(), torch.arange(rows, device="cuda") * 7 % vocab_size
    targets[::5] = -1
    _, exponents = softmax_statistics(logits, targets, vocab_size)
    q, _ = softmax_gradient_cast(logits, targets, exponents, vocab_size, z_loss)
    of_q, of_weight, of_inputs = (torch.tensor([value], device="cuda") for value in (0.0301 / FACTOR, 0.5, 0.25))
    weight, inputs = (normal(columns, d) * 30).to(E4M3), (normal(rows, d) * 30).to(E4M3)
    loss_weight = torch.tensor([0.03], device="cuda")
    return logits, targets, exponents, (q, of_q), loss_weight, (weight, of_weight), (inputs, of_inputs), z_loss


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_it_is_the_rest_of_the_exact_gradient(z_loss):
    given = case(z_loss=z_loss)
    logits, targets, _, (q, of_q), loss_weight, (weight, of_weight), (inputs, of_inputs), _ = given
    real, counted = logits.double()[:, :385], targets >= 0
    at = targets.clamp_min(0)[:, None]
    more = 1 + 2 * z_loss * real.logsumexp(1, keepdim=True)
    exact = real.softmax(1).gather(1, at) * more - 1
    stored = q.double().gather(1, at) * of_q.double()
    rest = torch.where(counted[:, None], exact * loss_weight.double() - stored, 0.0)
    expected = rest * weight.double()[at[:, 0]] * of_weight.double(), rest * inputs.double() * of_inputs.double()
    assert rest.abs().max() > 0.03 * 0.04, "E5M2 has lost something"
    for ours, theirs in zip(target_rows(*given), expected, strict=True):
        assert torch.count_nonzero(ours[~counted]) == 0
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-5 * theirs.abs().max().item())


def test_it_repeats():
    one, other = target_rows(*case()), target_rows(*case())
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))
