import math
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.flops import flops_per_token, parameter_count, peak_bf16_flops
from gpt2_fp8.model.gpt2 import GPT2, initialise, padded_vocabulary
from tests.common import CONFIG, VOCAB, build, ids


@pytest.mark.parametrize("bias", [True, False])
def test_parameter_count_is_that_of_the_model(bias):
    config = replace(CONFIG, bias=bias)
    model = build(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config, padded_vocabulary(VOCAB))


def test_gpt2_has_124_million_parameters():
    config = replace(CONFIG, n_layer=12, n_head=12, n_embd=768, n_positions=1024)
    assert parameter_count(config, 50257) == 124_439_808  # as published
    assert flops_per_token(config, 50304) == pytest.approx(8.55e8, rel=1e-2)


def test_only_known_gpus_have_a_peak():
    assert peak_bf16_flops("NVIDIA H200") == 989e12
    assert peak_bf16_flops("NVIDIA GeForce RTX 9090") is None


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (64, 64), (257, 320), (50257, 50304)])
def test_padded_vocabulary(size, padded):
    assert padded_vocabulary(size) == padded


def test_is_causal():
    model = build().eval()
    inputs = ids()[:, :-1].long()
    changed = inputs.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % VOCAB
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_state_dict_has_no_tied_weight_and_loads_back():
    model, other = build(seed=1), build(seed=2)
    state = model.state_dict()
    assert "head.weight" not in state
    assert not any("extra_state" in name for name in state)
    other.load_state_dict(state)
    assert other.head.weight is other.tokens.weight
    inputs = ids()[:, :-1].long()
    assert torch.equal(model(inputs), other(inputs))


def test_initial_values_are_gpt2s_and_the_seeds():
    config = replace(CONFIG, n_embd=256, n_positions=64)
    model = build(config)
    weights = dict(model.named_parameters())
    assert weights["tokens.weight"][:VOCAB].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.0.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.0.projection.weight"].std().item() == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(2 * 2)
    assert weights["blocks.1.mlp.fc2_weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert torch.count_nonzero(weights["tokens.weight"][VOCAB:]) == 0
    assert torch.equal(weights["head.layer_norm_weight"], torch.ones(256))
    again = GPT2(config, VOCAB, Composed(reference, recompute="none"))
    torch.manual_seed(99)  # the global generator plays no part
    initialise(again, 1)
    assert all(torch.equal(weights[name], value) for name, value in again.named_parameters())
    initialise(again, 2)
    assert not torch.equal(weights["tokens.weight"], again.tokens.weight)


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


def test_activations_follow_autocast():
    model = build()
    assert model(ids()[:, :-1].long()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids()[:, :-1].long()).dtype == torch.bfloat16


def test_dropout_acts_in_training_only():
    model = build(replace(CONFIG, dropout=0.5))
    inputs = ids()[:, :-1].long()
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))
