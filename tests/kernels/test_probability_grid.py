"""Which ids stand for all."""

import torch

from gpt2_fp8.kernels.probability_grid import frequent_ids


def test_the_most_frequent_targets_come_first_and_then_the_smallest_ids():
    targets = torch.tensor([5, 9, 5, -1, 2, 9, 5, -1, -1, -1])
    assert frequent_ids(targets, 12).tolist() == [5, 9, 2, 0, 1, 3, 4, 6, 7, 8, 10, 11]


def test_there_are_no_more_than_the_kernels_have_room_for():
    assert frequent_ids(torch.tensor([50000]), 50304).tolist() == [50000, *range(2047)]


def test_without_targets_they_are_the_smallest():
    assert frequent_ids(torch.tensor([-1, -1]), 3000).tolist() == list(range(2048))
