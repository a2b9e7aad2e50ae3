"""Drawn ids against exact probabilities, and what temperature, top-k and top-p leave out."""

import pytest
import torch

from gpt2_fp8.model.sampling import Sampling, candidates, draw

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2], dtype=torch.float64)
LOGITS = PROBABILITIES.log()[None] + 3


def exact(sampling):
    """The probability of each id."""
    ids, weights = candidates(LOGITS, sampling)
    found = torch.zeros(5, dtype=torch.float64)
    found[ids[0]] = weights[0]
    return found / found.sum()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.05, 0.4, 0.1, 0.25, 0.2]),
        (Sampling(top_k=2), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(top_k=99), [0.05, 0.4, 0.1, 0.25, 0.2]),
        (Sampling(top_p=0.6), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(top_p=0.66), [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        (Sampling(top_p=1e-9), [0, 1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.6), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(top_k=3, top_p=0.77), [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        (Sampling(temperature=0.0), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1e-30), [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_the_weights_are_the_probabilities(sampling, expected):
    torch.testing.assert_close(exact(sampling), torch.tensor(expected, dtype=torch.float64))


def test_a_temperature_sharpens_and_flattens():
    for temperature in (0.5, 2.0):
        powers = PROBABILITIES ** (1 / temperature)
        torch.testing.assert_close(exact(Sampling(temperature=temperature)), powers / powers.sum())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=4, top_p=0.9)], ids=str)
def test_ids_are_drawn_in_proportion(sampling):
    """20,000 draws: chi-squared of at most 4 degrees of freedom is above 18.5 once in a thousand times."""
    ids, weights = candidates(LOGITS, sampling)
    generator, times = torch.Generator().manual_seed(0), 20_000
    drawn = torch.bincount(torch.tensor([draw(ids[0], weights[0], generator) for _ in range(times)]), minlength=5)
    expected = exact(sampling) * times
    there = expected > 0
    assert drawn[~there].sum() == 0
    assert float(((drawn - expected)[there] ** 2 / expected[there]).sum()) < 18.5


def test_rows_have_candidates_of_their_own():
    both = torch.cat([LOGITS, LOGITS.flip(-1)])
    ids, weights = candidates(both, Sampling(top_k=2))
    assert ids.tolist() == [[1, 3], [3, 1]]
    torch.testing.assert_close(weights[0], weights[1])
