"""Drawn ids against exact probabilities; texts that are drawn together, each as alone; a text beyond the window."""

import pytest
import torch
from torch import nn

from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.model.generate import Sampling, Text, candidates, draw, generate, go_on
from tests.common import CONFIG, VOCAB
from tests.model.test_decoder import built, whole

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2], dtype=torch.float64)
LOGITS = PROBABILITIES.log()[None] + 3


def exact(sampling):
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


TOP_20 = Sampling(top_k=20)
PROMPTS = [[5], [1, 2, 3, 4, 5, 6], [200, 100]]


def drawn(model, prompts, tokens=8, sampling=TOP_20, end=None, seeds=None, capacity=16):
    texts = [Text(prompt, seed, tokens) for prompt, seed in zip(prompts, seeds or [3] * len(prompts), strict=True)]
    for _ in go_on(Decoder(model, len(texts), capacity), texts, sampling, VOCAB, end):
        pass
    return texts


def test_a_text_does_not_depend_on_its_neighbours():
    model = built(CONFIG)
    together = drawn(model, PROMPTS)
    assert together == [drawn(model, [prompt])[0] for prompt in PROMPTS]
    assert together == drawn(model, PROMPTS[::-1])[::-1]
    assert {text.ended for text in together} == {"tokens"}
    assert [len(text.ids) for text in together] == [8, 8, 8]


def test_a_seed_decides_and_global_randomness_is_left_alone():
    model = built(CONFIG)
    before = torch.get_rng_state()
    one, two, three = drawn(model, [[5]] * 3, seeds=[1, 2, 1])
    assert torch.equal(before, torch.get_rng_state())
    assert one == three
    assert one.ids != two.ids


def test_greedy_takes_the_likeliest_of_the_whole_forward():
    model = built(CONFIG)
    (text,) = drawn(model, [[9, 8]], tokens=10, sampling=Sampling(temperature=0.0))
    context = [9, 8]
    for new in text.ids:
        assert new == int(whole(model, context)[:VOCAB].argmax())
        context.append(new)


def test_a_text_ends_at_the_end_of_a_document_and_the_others_go_on():
    model, hot = built(CONFIG), {"sampling": Sampling(temperature=5.0), "seeds": [1, 2, 3]}
    free = drawn(model, PROMPTS, **hot)
    end = next(i for i in free[1].ids[2:] if i not in free[0].ids)
    held = drawn(model, PROMPTS, **hot, end=end)
    assert (held[1].ids, held[1].ended) == (free[1].ids[: free[1].ids.index(end)], "end of text")
    assert held[0] == free[0]


def test_padding_of_the_vocabulary_is_never_drawn():
    model = built(CONFIG)
    with torch.no_grad():
        model.tokens.weight[VOCAB:] = 50 * model.tokens.weight[3]  # the head's too
    assert model.tokens.num_embeddings > VOCAB
    assert all(i < VOCAB for text in drawn(model, PROMPTS, sampling=Sampling()) for i in text.ids)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=20), Sampling(temperature=0.0), Sampling(top_p=0.5)])
def test_a_text_ends_where_logits_are_not_finite(sampling):
    model = built(CONFIG)
    with torch.no_grad():
        model.positions.weight[4] = torch.nan
    texts = [drawn(model, [prompt], sampling=sampling)[0] for prompt in PROMPTS]
    assert [(text.ended, len(text.ids)) for text in texts] == [("not finite", 4), ("not finite", 0), ("not finite", 3)]


def test_each_text_has_a_number_of_tokens_of_its_own():
    model = built(CONFIG)
    texts = [Text([5], 1, 3), Text([6], 1, 9)]
    turns = sum(1 for _ in go_on(Decoder(model, 2, 16), texts, Sampling(), VOCAB, None))
    assert (turns, [len(text.ids) for text in texts]) == (9, [3, 9])


def test_a_text_longer_than_the_context_goes_on():
    (text,) = drawn(built(CONFIG), [[5, 6]], tokens=50)
    assert (len(text.ids), text.ended) == (50, "tokens")
