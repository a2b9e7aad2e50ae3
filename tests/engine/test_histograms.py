"""Distributions of tensors, beside numpy's."""

import numpy as np
import pytest
import torch

from gpt2_fp8.callbacks import histograms


@pytest.mark.parametrize("shape", [(3, 5), (257, 33), (1, 1)])
def test_counts_are_numpys(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (found,) = histograms.read(["x"], "weight", histograms.count([tensor]))
    values = tensor.numpy().astype(np.float64) / np.float64(found.amax)
    expected, _ = np.histogram(values, bins=histograms.BINS, range=(-1, 1))
    assert sum(found.counts) == tensor.numel()
    assert np.abs(np.array(found.counts) - expected).sum() <= 2, "float32 may put a number on an edge beside it"
    assert (found.amax, found.norm) == (tensor.abs().max().item(), pytest.approx(tensor.norm().item()))
    assert found.sum == pytest.approx(tensor.sum().item(), abs=1e-4)
    assert (found.edges[0], found.edges[-1]) == (-found.amax, found.amax)


def test_large_tensors_are_counted_in_parts(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    whole = histograms.count([tensor])
    monkeypatch.setattr(histograms, "_CHUNK", 64)
    parts = histograms.count([tensor])
    assert torch.equal(parts[:, :2], whole[:, :2])
    assert torch.equal(parts[:, 3:], whole[:, 3:])
    assert parts[0, 2].item() == pytest.approx(whole[0, 2].item(), rel=1e-14), "sums of float64 in another order"


def test_the_squares_of_millions_of_numbers_are_summed_to_float64():
    tensor = torch.randn(3_000_000, generator=torch.Generator().manual_seed(3))
    assert histograms.count([tensor])[0, 2].item() == pytest.approx(tensor.double().square().sum().item(), rel=1e-12)


def test_what_is_not_finite_is_left_out_and_zeros_are_not():
    tensors = [torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf, 0.0]), torch.zeros(4), torch.ones(2)]
    found = histograms.read(["nan", "inf", "zeros", "ones"], "gradient", histograms.count(tensors), divisor=0.5)
    assert ([stats.name for stats in found], sum(found[0].counts)) == (["zeros", "ones"], 4)
    assert (np.diff(found[0].edges) > 0).all(), "TensorBoard wants edges that rise"
    assert found[1].norm == pytest.approx(2 * 2**0.5), "before clipping by a half"
