"""Which source each sequence of a mixture comes from: every window has the weights, and position alone decides."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_fp8.config.run_length import largest_divisor
from gpt2_fp8.data.order import LARGEST, MAX_LANES, Deal, Mixing, lanes_of_share, whole_numbers


def depth(sources: int) -> int:
    return (sources - 1).bit_length()


WEIGHTS = st.lists(st.integers(1, 10**6), min_size=2, max_size=9)
COLUMNS = st.integers(1, 16)
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, COLUMNS, SEEDS, st.integers(0, 10**10), st.integers(1, 400))
def test_every_window_of_a_column_has_the_weights(
    weights: list[int], columns: int, seed: int, first: int, rows: int
) -> None:
    """By less than the depth of the tree; and any window of the whole by less than that for each column."""
    mixing = Mixing(weights, columns, seed)
    found = mixing.sources(first, rows)
    assert found.shape == (rows, columns)
    for source, weight in enumerate(weights):
        share = Fraction(weight, sum(weights))
        counts = np.cumsum(found == source, axis=0)
        for length in {1, rows // 3 + 1, rows}:
            windows = counts[length - 1 :] - np.concatenate([np.zeros((1, columns), int), counts[:-length]])
            assert np.abs(windows - float(share * length)).max() < depth(len(weights)) + 1e-6
            assert abs(int(windows[0].sum()) - share * length * columns) < columns * depth(len(weights))


def test_the_order_is_fixed() -> None:
    # Part of the format: a checkpoint's mixture is made again from its seed by later releases.
    assert Mixing([7, 3], 4, 1337).sources(0, 5).tolist() == FIXED
    assert Mixing([7, 3], 4, 1338).sources(0, 5).tolist() != FIXED


FIXED = [[0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]


def test_a_global_batch_is_balanced_better_than_the_bound_says() -> None:
    """Two sources: every batch of whole rows has its share to within two sequences, whatever the columns."""
    for columns, size in ((1, 7), (4, 8), (16, 480), (12, 252)):
        deal = Deal(Mixing([7, 3], columns, 5), [1, 1], size)
        counts = [int((deal.of_step(step) == 1).sum()) for step in range(50)]
        assert max(abs(count - 0.3 * size) for count in counts) < 2
        assert deal.sequences(50) == [50 * size - sum(counts), sum(counts)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-3, 1e12), min_size=2, max_size=20))
def test_weights_become_whole_numbers_of_their_proportion(weights: list[float]) -> None:
    numbers = whole_numbers(weights)
    assert all(number >= 1 for number in numbers)
    assert sum(numbers) <= LARGEST
    for weight, number in zip(weights, numbers, strict=True):
        assert abs(weight / sum(weights) - number / sum(numbers)) < 1e-7


def test_weights_are_taken_as_they_are_written() -> None:
    assert (whole_numbers([0.7, 0.3]), whole_numbers([1, 1, 2])) == ([7, 3], [1, 1, 2])
    assert (whole_numbers([380e9, 20e9]), whole_numbers([0.1, 0.2, 0.7])) == ([19, 1], [1, 2, 7])


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(1, 64), st.integers(1, 10**5), SEEDS, st.sampled_from([1, 2, 3, 4, 8]))
def test_lanes_of_ranks(weights: list[int], per_rank: int, units: int, seed: int, world: int) -> None:
    """The lanes that a rank reads are those of its sequences, and each lane of a source has about the same share."""
    size = per_rank * world
    columns = largest_divisor(size, MAX_LANES)
    lanes = [lanes_of_share(columns, units, weight, sum(weights)) for weight in weights]
    deal = Deal(Mixing(weights, columns, seed), lanes, size)
    numbers = np.concatenate([deal.of_step(step) for step in range(20)]).reshape(20, size)
    for rank in range(world):
        assert set(numbers[:, rank::world].reshape(-1).tolist()) <= set(deal.of_rank(rank, world))
    counts = np.bincount(numbers.reshape(-1), minlength=deal.lanes)
    for source, (first, own) in enumerate(zip(deal.first, lanes, strict=True)):
        share = counts[first : first + own]
        most = 2 * depth(len(weights)) * columns / own
        assert share.max() - share.min() <= most
        assert share.sum() == deal.sequences(20)[source]
