"""Random bits that are a function of what is rounded, and rounding whose mean is exact."""

import math

import pytest
import torch

from gpt2_fp8.engine.small_adamw import Keys, murmur3, random_bits, round_stochastically

CPU = torch.device("cpu")
COUNT = 1 << 16


def bits(seed=1, name="blocks.0.qkv.weight", update=1, start=0, count=COUNT):
    return random_bits(Keys.of(seed, name).at(update), start, count, CPU)


def test_the_finalizer_is_murmurhash3s():
    """Its values by hand in Python's unbounded integers, and its known fixed point."""

    def plain(x):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * factor % 2**32
        return x ^ (x >> 16)

    assert murmur3(0) == 0
    assert [murmur3(x) for x in (1, 2**31, 2**32 - 1)] == [plain(x) for x in (1, 2**31, 2**32 - 1)]
    keys = Keys(123, 2**32 - 5)
    wanted = [plain((plain(i ^ keys.first) + keys.second) % 2**32) for i in range(1000)]
    assert random_bits(keys, 0, 1000, CPU).tolist() == wanted


def test_bits_are_a_function_of_seed_name_update_and_index():
    assert torch.equal(bits(), bits())
    assert torch.equal(bits()[100:200], bits(start=100, count=100)), "whatever is computed beside them"
    for other in (bits(seed=2), bits(name="blocks.1.qkv.weight"), bits(update=2)):
        same = (bits() == other).float().mean().item()
        assert same < 1e-3


def test_bits_are_even():
    """Each bit is 1 half of the time, and the words of neighbours, updates and names have nothing in common."""
    words = bits()
    assert int(words.min()) >= 0
    assert int(words.max()) < 2**32
    for other in (words, words ^ words.roll(1), words ^ bits(update=2), words ^ bits(name="tokens.weight")):
        if other is words or bool((other != 0).any()):
            share = torch.stack([(other >> i & 1).double().mean() for i in range(32)])
            assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize("value", [1.0 + 2**-8, 3e-9, -1.003, 2.0**-130, 0.0, 1.5])
def test_the_mean_of_what_is_rounded_is_the_value(value):
    values = torch.full((COUNT,), value)
    rounded = round_stochastically(values, bits())
    assert rounded.dtype == torch.bfloat16
    found = rounded.unique()
    assert len(found) <= 2, "one of its two neighbours"
    step = (found.max() - found.min()).item()
    assert found.min() <= value <= found.max()
    assert abs(rounded.double().mean().item() - values[0].item()) <= 5 * step / 2 / math.sqrt(COUNT)


def test_what_bfloat16_holds_stays():
    values = torch.randn(COUNT).bfloat16().float()
    assert torch.equal(round_stochastically(values, bits()).float(), values)


def moving_average(rounded, beta2=0.999, updates=6000):
    """A mean of squares of gradients that become a third as large half-way, and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    exact, kept = torch.zeros(2048, dtype=torch.float64), torch.zeros(2048)
    for update in range(1, updates + 1):
        squares = torch.randn(2048, generator=generator).square() * (1.0 if update <= updates // 2 else 0.09)
        exact = exact * beta2 + squares.double() * (1 - beta2)
        kept = rounded(kept * beta2 + squares * (1 - beta2), update).float()
    return (kept.double().mean() / exact.mean()).item()


def test_a_second_moment_rounded_to_nearest_never_falls_and_one_rounded_stochastically_does():
    """At beta2 = 0.999 it changes by a thousandth a step, less than half of bfloat16's last bit."""
    keys = Keys.of(1, "weight")
    nearest = moving_average(lambda x, _: x.bfloat16())
    stochastic = moving_average(lambda x, update: round_stochastically(x, random_bits(keys.at(update), 0, 2048, CPU)))
    assert nearest > 5
    assert abs(stochastic - 1) < 0.01
