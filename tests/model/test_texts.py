"""Texts that are drawn together: each as alone, each ending by itself."""

import pytest
import torch

from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.model.sampling import Sampling
from gpt2_fp8.model.texts import Text, go_on
from tests.common import CONFIG, VOCAB
from tests.model.test_decoder import built, whole

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
