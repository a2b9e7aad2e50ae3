"""The cache against the whole forward: the same logits at every position, for every option of a block."""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.model.gpt2 import GPT2
from tests.common import CONFIG, VOCAB
from tests.model.options import OPTIONS, configured

TIGHT = {"rtol": 0, "atol": 1e-11}  # float64, of logits whose standard deviation is about 1


def built(config, *borders):
    """A model in float64 in which every parameter matters."""
    model = GPT2(config, VOCAB, Composed(reference, recompute="none"), (), *borders).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def contexts(*lengths):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def whole(model, context):
    """The logits of what follows, from one forward of the whole context."""
    return model(torch.tensor([context]))[0, -1]


def assert_follows(decoder, logits, model):
    assert logits.std() > 0.1
    for row, context in enumerate(decoder.contexts):
        torch.testing.assert_close(logits[row], whole(model, context), **TIGHT)


@pytest.mark.parametrize("name", ["none", *OPTIONS])
def test_each_token_sees_what_the_whole_forward_sees(name):
    """Rows of three lengths, up to the last position."""
    model = built(CONFIG if name == "none" else configured(name))
    decoder = Decoder(model, 3, CONFIG.n_positions)
    full = contexts(16, 12, 9)
    logits = decoder.begin([ids[:-8] for ids in full])
    assert_follows(decoder, logits, model)
    for place in range(8):
        logits = decoder.step([ids[len(ids) - 8 + place] for ids in full])
        assert_follows(decoder, logits, model)
    assert decoder.contexts == full


def test_a_single_row_needs_no_mask():
    model = built(CONFIG)
    decoder, (full,) = Decoder(model, 1, 16), contexts(16)
    decoder.begin([full[:1]])
    for new in full[1:]:
        assert_follows(decoder, decoder.step([new]), model)


@pytest.mark.parametrize("options", ["none", "all together"])
def test_a_text_that_outgrows_its_room_goes_on_with_its_newest_half(options):
    model = built(CONFIG if options == "none" else configured(options))
    decoder = Decoder(model, 2, 8)
    first, second = contexts(30, 23)
    decoder.begin([first[:10], second[:3]])
    assert decoder.contexts == [first[2:10], second[:3]], "of a longer prompt, the end"
    lengths = []
    for one, other in zip(first[10:], second[3:], strict=True):
        assert_follows(decoder, decoder.step([one, other]), model)
        lengths.append(tuple(map(len, decoder.contexts)))
    assert lengths[:6] == [(4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (4, 4)]
    assert decoder.contexts == [first[-len(decoder.contexts[0]) :], second[-len(decoder.contexts[1]) :]]


def test_rows_that_outgrow_their_room_at_different_times():
    model = built(CONFIG)
    decoder = Decoder(model, 2, 8)
    first, second = contexts(30, 27)
    decoder.begin([first[:10], second[:7]])
    for one, other in zip(first[10:], second[7:], strict=True):
        assert_follows(decoder, decoder.step([one, other]), model)


def test_a_row_that_has_ended_stays_and_the_others_go_on():
    model = built(CONFIG)
    decoder = Decoder(model, 2, 8)
    first, second = contexts(8, 20)
    decoder.begin([first, second[:2]])
    for new in second[2:]:
        logits = decoder.step([None, new])
        torch.testing.assert_close(logits[1], whole(model, decoder.contexts[1]), **TIGHT)
    assert decoder.contexts[0] == first


@pytest.mark.parametrize("options", ["none", "RoPE"])
@pytest.mark.parametrize("begins", [False, True])
def test_tokens_see_their_document_alone_where_the_model_was_trained_so(options, begins):
    model = built(CONFIG if options == "none" else configured(options), 7, begins)
    decoder = Decoder(model, 2, 16)
    first, second = [1, 7, 3, 4, 5, 7, 6, 8, 9, 7], [7, 2, 2, 2, 7, 7, 1, 0, 3, 7]
    assert_follows(decoder, decoder.begin([first[:3], second[:1]]), model)
    for one, other in zip(first[3:], second[1:], strict=False):
        assert_follows(decoder, decoder.step([one, other]), model)
    plain = Decoder(built(replace(CONFIG)), 1, 16)
    plain.begin([first[:3]])
    with pytest.raises(AssertionError):
        assert_follows(plain, plain.step([first[3]]), model)
