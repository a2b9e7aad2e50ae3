"""GPT-2's sizes with a block of 2026: counts by hand, the squared ReLU, and the export."""

from pathlib import Path

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.layers.reference import activate
from gpt2_fp8.model.parameters import flops_per_token, parameter_count
from gpt2_fp8.train.huggingface import choose_architecture

SIZES = {"gpt2_modern": (12, 768), "gpt2_modern_medium": (24, 1024), "gpt2_modern_large": (36, 1280)}
COUNTS = {"gpt2_modern": 123_590_400, "gpt2_modern_medium": 353_557_504, "gpt2_modern_large": 772_280_576}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_flops_are_those_counted_by_hand(name):
    (layers, d), rows = SIZES[name], 50304
    model = compose.preflight([f"model={name}", "data.tokenizer=gpt2"])[0].model
    # queries, keys, values and projection; fc1 and fc2 of 4 d; two norms; the norms of queries and keys, of 128
    block = 4 * d * d + 2 * 4 * d * d + 2 * d + 2 * 128
    assert parameter_count(model, rows) == COUNTS[name] == rows * d + layers * block + d
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


def test_no_class_of_hugging_faces_computes_it():
    with pytest.raises(
        UserError, match=r"no class of Hugging Face's computes model=gpt2_modern: .*no squared-ReLU MLP"
    ):
        choose_architecture(compose.preflight(["model=gpt2_modern", "data.tokenizer=gpt2"])[0].model, Path("step"))
