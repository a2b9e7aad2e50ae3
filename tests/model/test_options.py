"""Every option of a model, alone and with all others, against a float64 decoder of formulas (tests/model/exact.py)."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gpt2_fp8.config.block_spec import Bands, RoPE, block_spec
from gpt2_fp8.layers.reference import angles
from gpt2_fp8.model.generate import generate
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import flops_per_token, parameter_count, parameters
from tests.common import CONFIG, VOCAB, build, ids, loss_of
from tests.model import exact
from tests.model.options import OPTIONS, configured

every_option = pytest.mark.parametrize("name", OPTIONS)
ROWS = padded_vocabulary(VOCAB)
LLAMA_3_2 = RoPE(500_000.0, 32.0, Bands(1.0, 4.0, 8192))


def told_apart(config, seed=1):
    """A model in which every number counts: biases are not 0, norms not 1, and weights large enough to bend softmax."""
    model = build(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape).normal_(generator=generator)
            parameter.mul_(5.0) if parameter.dim() == 2 else parameter.add_(0.3 * noise)
            assert parameter.abs().sum() > 0, name
    return model


@every_option
def test_loss_and_gradients_are_those_of_the_formulas(name):
    config = configured(name)
    model, batch = told_apart(config).double(), ids(sequences=2)
    expected_loss, expected = exact.loss_and_gradients(config, dict(model.named_parameters()), batch, VOCAB)
    with torch.autocast("cpu", enabled=False):
        out = model(batch[:, :-1].long())[..., :VOCAB]
    loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten().long())
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    for parameter, p in model.named_parameters():
        assert torch.allclose(p.grad, expected[parameter], rtol=1e-9, atol=1e-13), parameter


@every_option
def test_float32_rounds_no_more_than_it_must(name):
    config = configured(name)
    model, batch = told_apart(config), ids(sequences=2)
    expected_loss, expected = exact.loss_and_gradients(config, dict(model.named_parameters()), batch, VOCAB)
    loss = loss_of(model)(batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    for parameter, p in model.named_parameters():
        assert (p.grad - expected[parameter]).norm() < 2e-5 * expected[parameter].norm() + 1e-7, parameter


@every_option
def test_no_option_is_without_effect(name):
    """A key that does nothing would pass the tests above."""
    plain, batch = told_apart(CONFIG), ids(sequences=2)
    model, weights = told_apart(configured(name)), dict(plain.named_parameters())
    with torch.no_grad():
        for parameter, p in model.named_parameters():  # equal where the two have the same
            if parameter in weights and weights[parameter].shape == p.shape:
                p.copy_(weights[parameter])
        assert loss_of(model)(batch).item() != loss_of(plain)(batch).item()


@every_option
def test_parameters_are_counted_and_named(name):
    config = configured(name)
    model = build(config)
    built = {parameter: tuple(p.shape) for parameter, p in model.named_parameters()}
    assert built == {p.name: p.shape for p in parameters(config, ROWS)}
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config, ROWS)
    other = build(config, seed=2)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids()[:, :-1].long()), model(ids()[:, :-1].long()))
    assert ("head.weight" in model.state_dict()) == (not config.tied_head)
    assert (other.head.weight is other.tokens.weight) == config.tied_head
    assert not any("extra_state" in key for key in model.state_dict())
    assert list(model.named_buffers()) == []  # data parallelism would copy them over the ranks'


@every_option
def test_flops_are_those_that_torch_counts(name):
    """Attention in full, forward and backward. Vectors and tables are parameters of no GEMM: the rule counts some."""
    config = configured(name)
    model, batch = build(config), ids(sequences=2)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_of(model)(batch).backward()
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counter.get_total_flops() == (flops_per_token(config, ROWS) - 6 * vectors) * batch[:, :-1].numel()


@every_option
def test_bf16_stays_close(name):
    model, batch = told_apart(configured(name)), ids()
    expected = loss_of(model)(batch).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch[:, :-1].long()).dtype == torch.bfloat16
        assert loss_of(model)(batch).item() == pytest.approx(expected, rel=5e-3)


@every_option
def test_a_later_token_changes_no_earlier_logit_and_dropout_acts(name):
    model = build(configured(name, dropout=0.5))
    inputs = ids()[:, :-1].long()
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    changed = inputs.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % VOCAB
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("name", ["RoPE", "all together"])
def test_text_is_drawn_by_the_same_positions_as_in_training(name, monkeypatch):
    """The window is always full, and what stands behind the last token is never seen."""
    config = configured(name)
    model = told_apart(config).eval()
    monkeypatch.setattr("gpt2_fp8.model.generate.TOP_K", 1)
    known = [1, 2, 3, *generate(model, [1, 2, 3], 20, VOCAB, config.n_positions, seed=0)]
    for i in range(3, len(known)):
        window = known[max(0, i - config.n_positions) : i]
        assert model(torch.tensor([window]))[0, -1, :VOCAB].argmax() == known[i]


@pytest.mark.parametrize("size", [64, 128])
def test_angles_are_exact_at_the_end_of_a_long_context(size):
    """Llama 3.2 1B has heads of 64; the rule is that of `exact.frequency`."""
    config = replace(
        CONFIG, positions="rope", rope_base=500_000.0, rope_scaling=32.0, rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0, rope_original_positions=8192,
    )  # fmt: skip
    assert block_spec(config).positions == LLAMA_3_2
    found = angles(LLAMA_3_2, size, 8192, torch.device("cpu"))
    assert (found.dtype, found.shape) == (torch.float64, (8192, size // 2))
    for i in range(size // 2):
        expected = 8191 * exact.frequency(config, i, size)
        assert math.cos(found[8191, i]) == pytest.approx(math.cos(expected), abs=1e-9)
        assert math.sin(found[8191, i]) == pytest.approx(math.sin(expected), abs=1e-9)
    kept = [i for i in range(size // 2) if exact.frequency(config, i, size) == 500_000.0 ** (-2 * i / size)]
    assert 0 < len(kept) < size // 2, "some are scaled and some are not"
