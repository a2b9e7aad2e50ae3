import pytest
import torch
from torch import nn

from gpt2_fp8.model.generate import generate


class Successor(nn.Module):
    """Always predicts the next number, from the last position asked for."""

    def __init__(self, vocab_size):
        super().__init__()
        self.columns = vocab_size + 7  # padding, made the likeliest of all
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        logits = torch.full((*ids.shape, self.columns), -50.0)
        logits.scatter_(2, ((ids + 1) % self.vocab_size)[..., None], 50.0)
        logits[..., self.vocab_size :] = 100.0
        return logits


def test_continues_past_the_window_and_never_draws_padding():
    assert generate(Successor(10), [3], 12, 10, n_positions=4, seed=0) == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5]


def test_leaves_global_randomness_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = generate(Successor(10), [1], 5, 10, 4, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert first == generate(Successor(10), [1], 5, 10, 4, seed=1)


@pytest.mark.parametrize("odd", [10, 16, -1])
def test_an_id_that_the_model_has_not_is_refused(odd):
    """10 to 16 are columns of padding."""
    with pytest.raises(ValueError, match=f"the prompt has the id {odd} of a vocabulary of 10"):
        generate(Successor(10), [3, odd, 2], 5, 10, 4, seed=1)
