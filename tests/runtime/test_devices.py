"""The peak memory of the process, for real."""

import sys

import pytest
import torch

from gpt2_fp8.runtime import devices


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_the_peak_counts_what_is_gone_again_until_it_is_forgotten():
    devices.reset_peak_host()
    start = devices.peak_host_gb()
    held = torch.ones(3 << 28, dtype=torch.uint8)  # bytes: three quarters of a GiB
    del held
    assert start + 0.5 < devices.peak_host_gb() < 100
    devices.reset_peak_host()
    assert devices.peak_host_gb() < start + 0.25
