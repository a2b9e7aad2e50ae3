"""GPT-2's sizes with a block of 2026: counts by hand, the squared ReLU, weights that begin at 0, and the export."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.layers.reference import activate
from gpt2_fp8.model.generate import generate
from gpt2_fp8.model.parameters import flops_per_token, parameter_count
from gpt2_fp8.train.huggingface import choose_architecture
from tests.common import CONFIG, VOCAB, build, ids, loss_of
from tests.model.options import MODERN

SIZES = {"gpt2_modern": (12, 768), "gpt2_modern_medium": (24, 1024), "gpt2_modern_large": (36, 1280)}
COUNTS = {"gpt2_modern": 162_223_872, "gpt2_modern_medium": 405_068_800, "gpt2_modern_large": 836_669_696}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_flops_are_those_counted_by_hand(name):
    (layers, d), rows = SIZES[name], 50304
    model = compose.preflight([f"model={name}", "data.tokenizer=gpt2"])[0].model
    # queries, keys, values and projection; fc1 and fc2 of 4 d; two norms; the norms of queries and keys, of 128
    block = 4 * d * d + 2 * 4 * d * d + 2 * d + 2 * 128
    assert parameter_count(model, rows) == COUNTS[name] == 2 * rows * d + layers * block + d
    assert flops_per_token(model, rows) == 6 * (rows * d + layers * block + d) + 12 * layers * d * 1024


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_squared_relu_and_its_gradient_are_rounded_once(dtype):
    """max(h, 0)^2 and 2 max(h, 0) g, in float64 of the same numbers; the doubling is exact."""
    generator = torch.Generator().manual_seed(0)
    h, g = (torch.randn(64, 128, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    h[0, :4] = torch.tensor([0.0, -0.0, float("-inf"), 300.0])
    h.requires_grad_()
    y = activate(h, "relu_squared")
    y.backward(g)
    wide, half = h.detach().double(), torch.finfo(dtype).eps / 2
    exact = torch.where(wide > 0, wide * wide, 0.0)
    slope = torch.where(wide > 0, 2 * wide * g.double(), 0.0)
    assert ((y.double() - exact).abs() <= half * exact).all()
    assert ((h.grad.double() - slope).abs() <= half * slope.abs()).all()
    assert torch.isnan(activate(torch.tensor([float("nan")]), "relu_squared")).all()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_into_the_residual_stream_and_an_own_head_begin_at_zero(tied):
    drawn = build(replace(CONFIG, **{**MODERN, "tied_head": tied}))
    model = build(replace(drawn.config, zero_init=True))
    zeros = {name for name, p in model.named_parameters() if not p.any()}
    assert zeros == {
        *(f"blocks.{i}.{part}" for i in range(2) for part in ("projection.weight", "mlp.fc2_weight")),
        *([] if tied else ["head.weight"]),
    }
    others = dict(drawn.named_parameters())
    assert all(torch.equal(p, others[name]) for name, p in model.named_parameters() if name not in zeros)
    if not tied:
        batch = ids()
        assert torch.equal(model(batch[:, :-1].long()), torch.zeros(8, 16, 320)), "all ids are as likely"


def test_a_head_of_zeros_learns_first_then_what_is_before_it():
    model = build(replace(CONFIG, **MODERN, zero_init=True))
    optimizer, still = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model)(ids()).backward()
        still.append({name for name, p in model.named_parameters() if not p.grad.any()})
        optimizer.step()
    names = {name for name, _ in model.named_parameters()}
    into = {f"blocks.{i}.{part}" for i in range(2) for part in ("projection.weight", "mlp.fc2_weight")}
    outside = {"head.weight", "head.layer_norm_weight", "tokens.weight"}
    assert still == [names - {"head.weight"}, names - into - outside, set()]


def test_text_of_a_model_of_zeros_is_drawn():
    model = build(replace(CONFIG, **MODERN, zero_init=True)).eval()
    drawn = generate(model, [1, 2, 3], 20, VOCAB, CONFIG.n_positions, seed=0)
    assert len(drawn) == 20
    assert len(set(drawn)) > 5


def test_no_class_of_hugging_faces_computes_it():
    with pytest.raises(
        UserError, match=r"no class of Hugging Face's computes model=gpt2_modern: .*no squared-ReLU MLP"
    ):
        choose_architecture(compose.preflight(["model=gpt2_modern", "data.tokenizer=gpt2"])[0].model, Path("step"))
