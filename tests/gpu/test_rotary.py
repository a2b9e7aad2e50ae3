"""QK-norm and RoPE of packed queries and keys, and their backward, against float64."""

import pytest
import torch

from tests.gpu.kernels import DEVICE, bits, need, prepare_heads, prepare_heads_backward
from tests.kernels.rotary_cases import CASES, Case

pytestmark = pytest.mark.fp8

ROUNDED = 2.0**-8  # half a unit of bfloat16's last place, of a power of two
OPTIONS = [(True, True), (True, False), (False, True)]
# a batch, tokens: one row; as many as a program's, and one more; several rows of programs
SHAPES = [(1, 1), (1, 32), (3, 11), (2, 300)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("batch", "tokens"), SHAPES)
def test_every_shape(case, batch, tokens):
    made = Case(*case, batch, tokens, DEVICE)
    made.check_forward(prepare_heads, ROUNDED)
    made.check_backward(prepare_heads_backward, ROUNDED)


@pytest.mark.parametrize(("norm", "rope"), OPTIONS)
@pytest.mark.parametrize(("heads", "size"), [(12, 64), (6, 128)])
def test_a_micro_batch_of_124m(heads, size, norm, rope):
    need(24)
    made = Case(heads, heads, size, norm, rope, 64, 1024, DEVICE)
    made.check_forward(prepare_heads, ROUNDED)
    made.check_backward(prepare_heads_backward, ROUNDED)


def test_one_row_that_is_not_finite_stays_alone():
    """Its head's results and gradients are no numbers; other rows have the bits that they had."""
    made = Case(4, 4, 64, True, True, 2, 50, DEVICE)
    packed, gradient = made.packed.clone(), torch.cat(made.upstream, 2).flatten(2)
    packed[1, 7, 5] = torch.nan
    expected = prepare_heads(made.packed, 4, 4, *made.given)
    found = prepare_heads(packed, 4, 4, *made.given)
    spoilt = torch.zeros_like(found[0], dtype=torch.bool)
    spoilt[1, 7, 0] = True
    assert found[0][spoilt].isnan().all()
    assert torch.equal(found[0][~spoilt], expected[0][~spoilt])
    assert torch.equal(found[1], expected[1])
    clean = gradient.clone()
    prepare_heads_backward(*made.split(clean)[:2], made.packed, clean, *made.given)
    prepare_heads_backward(*made.split(gradient)[:2], packed, gradient, *made.given)
    assert made.split(gradient)[0][spoilt].isnan().all()
    assert torch.equal(made.split(gradient)[0][~spoilt], made.split(clean)[0][~spoilt])
    assert torch.equal(made.split(gradient)[1], made.split(clean)[1])


def test_more_elements_than_int32_counts():
    """The last sequence of a large batch has the bits that it has alone."""
    need(40)
    batch, tokens, heads, size = 33, 16384, 16, 128
    alone = Case(heads, heads, size, True, True, 1, tokens, DEVICE)
    packed = torch.zeros(batch, *alone.packed.shape[1:], dtype=torch.bfloat16, device=DEVICE)
    assert packed.numel() > 2**31
    packed[-1] = alone.packed[0]
    expected = prepare_heads(alone.packed, heads, heads, *alone.given)
    for got, want in zip(prepare_heads(packed, heads, heads, *alone.given), expected, strict=True):
        assert torch.equal(bits(got[-1]), bits(want[0]))
    small = torch.cat(alone.upstream, 2).flatten(2)
    gradient = torch.zeros_like(packed)
    gradient[-1] = small[0]
    prepare_heads_backward(*alone.split(small)[:2], alone.packed, small, *alone.given)
    prepare_heads_backward(*alone.split(gradient)[:2], packed, gradient, *alone.given)
    assert torch.equal(bits(gradient[-1]), bits(small[0]))
