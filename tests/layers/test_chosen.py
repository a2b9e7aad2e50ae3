"""What a run is told of the fused layers' kernels follows its shapes."""

import pytest

from gpt2_fp8.layers import chosen


@pytest.mark.parametrize(
    ("rows", "n_embd", "missing", "exponent"),
    [
        (65536, 768, None, 11),
        (16384, 1024, None, 11),
        (16320, 768, None, 15),  # too few rows
        (16400, 768, None, 15),  # no multiple of 64
        (65536, 1280, None, 15),  # too wide
        (65536, 768, "cuda-core is not installed", 15),
    ],
)
def test_the_heads_factor_is_that_of_the_way_it_goes(monkeypatch, rows, n_embd, missing, exponent):
    monkeypatch.setattr("gpt2_fp8.kernels.nvrtc.missing", lambda: missing)
    assert chosen.head_factor(rows, 50304, n_embd) == 2.0**exponent
    said = chosen._logits(rows, 50304, n_embd, missing is not None)
    assert (said == "never in memory") == (exponent == 11)
