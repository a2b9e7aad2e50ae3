import math

import pytest
import torch

from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2, initialise, padded_vocabulary
from gpt2_fp8.model.parameters import peak_bf16_flops
from tests.common import CONFIG, build, ids


def test_only_known_gpus_have_a_peak():
    assert peak_bf16_flops("NVIDIA H200") == 989e12
    assert peak_bf16_flops("NVIDIA GeForce RTX 9090") is None


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (64, 64), (257, 320), (50257, 50304)])
def test_padded_vocabulary(size, padded):
    assert padded_vocabulary(size) == padded


def test_state_dict_has_no_tied_weight_and_loads_back():
    model, other = build(seed=1), build(seed=2)
    state = model.state_dict()
    assert "head.weight" not in state
    assert not any("extra_state" in name for name in state)
    other.load_state_dict(state)
    assert other.head.weight is other.tokens.weight
    inputs = ids()[:, :-1].long()
    assert torch.equal(model(inputs), other(inputs))


def test_before_training_every_id_is_about_as_likely():
    """The loss is ln 50,257 = 10.82 and little more: whoever sees that has not trained."""
    size = 50257
    model = GPT2(CONFIG, size, Composed(reference, recompute="none"))
    initialise(model, seed=1)
    drawn = torch.randint(size, (8, CONFIG.n_positions + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(drawn[:, :-1])[..., :size]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten()).item()
    assert 0 <= loss - math.log(size) < 0.1
