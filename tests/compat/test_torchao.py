"""What is expected of torchao's private parts: that they compute a product, and its two gradients, with our weight."""

import pytest
import torch

from gpt2_fp8.compat.torchao import Float8Product, why_not

pytest.importorskip("torchao.float8")


def test_it_can_be_used():
    assert why_not() is None


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_product_and_its_gradients_are_near_the_plain_ones(recipe):
    from torchao.float8 import Float8LinearConfig

    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)  # a CPU has no FP8 products
    product = Float8Product(config)
    x, weight, g = (torch.randn(shape) for shape in ((32, 64), (48, 64), (32, 48)))
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = product(*leaves, None)
    y.backward(g.to(y.dtype))
    expected = x @ weight.t(), g @ weight, g.t() @ x
    for ours, plain in zip((y, leaves[0].grad, leaves[1].grad), expected, strict=True):
        assert (ours.float() - plain).norm() < 0.08 * plain.norm()
        assert not torch.equal(ours.float(), plain)
