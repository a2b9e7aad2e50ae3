"""The peak memory of the process, for real."""

import sys

import pytest
import torch

from gpt2_fp8.runtime import host_memory

SIZE = 1 << 28  # bytes: a quarter of a GiB


def touched():
    """Memory that is really there, and that goes back to the system when it is freed."""
    return torch.ones(SIZE, dtype=torch.uint8)


def test_the_peak_counts_what_is_gone_again():
    before = host_memory.peak_gb()
    held = [touched() for _ in range(3)]
    del held
    peak = host_memory.peak_gb()
    assert before < peak < 100
    assert peak > 0.75
    assert host_memory.peak_gb() == peak


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_a_job_of_a_sweep_does_not_have_the_peak_of_the_one_before():
    host_memory.reset_peak()
    start = host_memory.peak_gb()
    held = [touched() for _ in range(3)]
    del held
    assert host_memory.peak_gb() > start + 0.5
    host_memory.reset_peak()
    assert host_memory.peak_gb() < start + 0.25
