"""The emulated head's probabilities in E5M2: their grid, factors and rests against float64."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.kernels.rounding import mean_of_rounded
from gpt2_fp8.layers.emulated_probabilities import UNIT, gradient, softmax, stored

E5M2 = torch.float8_e5m2
LARGEST = 57344.0
ROWS, COLUMNS, VOCAB, IDS = 96, 384, 300, 40
IGNORED = slice(0, None, 7)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr("gpt2_fp8.kernels.probability_grid.IDS", IDS)


def some(spread=1.0):
    """Logits, of which those of padded columns are huge, and targets of which few ids are most."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, COLUMNS, generator=generator) * spread
    logits[:, VOCAB:] = 1e4
    targets = (VOCAB ** torch.rand(ROWS, generator=generator) - 1).long()
    targets[IGNORED] = -1
    return logits, targets


def exact(logits, targets):
    """Real logits, their references and the logarithms of their sums, in float64."""
    real, counted = logits[:, :VOCAB].double(), targets >= 0
    counts = torch.bincount(targets[counted], minlength=VOCAB)
    ids = counts.sort(descending=True, stable=True).indices[:IDS]
    few = real[:, ids].bfloat16().double()
    references = few.logsumexp(1) - few.amax(1).abs() / 256  # what rounding to bfloat16 may have added
    at_target = real.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    return real, torch.where(counted, references.maximum(at_target), references), real.logsumexp(1)


def assert_cast(values, u):
    """Values are u, rounded once."""
    off = (values.double() - u.float().to(E5M2).double()).abs()
    assert torch.count_nonzero(off) <= off.numel() // 1000, "float32's error where a number is halfway between two"
    assert torch.all(off <= 2**-2 * u.clamp_min(2**-16) * 1.01)


def at(x, targets):
    return x.gather(1, targets.clamp_min(0)[:, None])[:, 0]


def test_the_grid_is_of_each_rows_own_reference():
    logits, targets = some()
    real, references, log_sums = exact(logits, targets)
    q = stored(softmax(logits, VOCAB, None), logits, targets)
    u = torch.exp(real - references[:, None]) * UNIT
    assert u.max() < LARGEST, "no row is far from its reference"
    assert q.values.dtype == E5M2
    assert_cast(q.values[:, :VOCAB], u)
    assert torch.count_nonzero(q.values[:, VOCAB:].float()) == 0
    counted = targets >= 0
    expected = torch.exp(references - log_sums) * counted
    assert len(expected[counted].unique()) == counted.sum()
    torch.testing.assert_close(q.factors[:, 0].double(), expected, rtol=1e-5, atol=0)
    has = at(q.values.double(), targets) * expected / (UNIT * mean_of_rounded(E5M2))
    rest = (torch.exp(at(real, targets) - log_sums) - 1 - has) * counted
    torch.testing.assert_close(q.rest[:, 0].double(), rest, rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(q.factors[IGNORED]) == torch.count_nonzero(q.rest[IGNORED]) == 0


def test_a_row_that_would_saturate_has_a_sum_of_its_own():
    logits, targets = some()
    _, references, _ = exact(logits, targets)
    rare = torch.bincount(targets[targets >= 0], minlength=VOCAB).argmin()
    limit = torch.log(torch.tensor(LARGEST / UNIT))
    over, below, ignored = 5, 6, 7
    logits[:, rare] = -20.0
    for row, away in ((over, 0.01), (below, -0.01), (ignored, 3.0)):
        logits[row, rare] = references[row] + limit + away
    real, again, log_sums = exact(logits, targets)
    torch.testing.assert_close(again, references)
    q = stored(softmax(logits, VOCAB, None), logits, targets)
    references[[over, ignored]] = log_sums[[over, ignored]]
    assert_cast(q.values[:, :VOCAB], torch.exp(real - references[:, None]) * UNIT)
    assert q.factors[over] == 1
    assert q.factors[below] < 0.05
    assert q.factors[ignored] == 0
    assert q.values[over].float().max() <= UNIT < 2**15 < q.values[below].float().max()


@pytest.mark.parametrize("penalty", [None, (0.01, 0.0), (0.0, 0.3), (0.2, 0.1)])
def test_what_is_stored_and_the_rest_are_the_gradient(penalty):
    """At each target exactly, elsewhere to two bits of mantissa."""
    logits, targets = some()
    p = softmax(logits, VOCAB, penalty)
    exactly = gradient(p, targets, COLUMNS).double()
    real = logits[:, :VOCAB].double().requires_grad_()
    kept = targets >= 0
    loss = F.cross_entropy(real[kept], targets[kept], reduction="sum")
    if penalty:
        loss = loss + penalty[0] * real[kept].logsumexp(1).square().sum()
        loss = loss + penalty[1] * real[kept].square().mean(1).sum()
    loss.backward()
    torch.testing.assert_close(exactly[:, :VOCAB], real.grad, rtol=1e-4, atol=1e-7)
    q = stored(p, logits, targets)
    meant = q.values.double() * q.factors.double() / (UNIT * mean_of_rounded(E5M2))
    torch.testing.assert_close(at(meant, targets) + q.rest[:, 0], at(exactly, targets), rtol=1e-6, atol=1e-6)
    exactly[kept, targets[kept]] = meant[kept, targets[kept]] = 0
    torch.testing.assert_close(meant, exactly, rtol=2**-3 + 0.003, atol=2**-27)


def test_all_ids_are_frequent_where_there_are_no_more(monkeypatch):
    monkeypatch.setattr("gpt2_fp8.kernels.probability_grid.IDS", 2048)
    logits, targets = some()
    q = stored(softmax(logits, VOCAB, None), logits, targets)
    kept = targets >= 0
    torch.testing.assert_close(q.factors[kept], torch.ones(int(kept.sum()), 1), rtol=2**-5, atol=0)
