"""QK-norm and RoPE in Triton's interpreter, which needs no GPU, against float64: see `test_rotary`."""

import pytest

from gpt2_fp8.kernels import rotary
from tests.kernels.rotary_cases import CASES, Case

TRUNCATED = 2.0**-7  # the interpreter leaves out bfloat16's last bits instead of rounding them
every = pytest.mark.parametrize("case", CASES, ids=str)  # of 74 rows: no multiple of a program's


@every
def test_forward(case):
    Case(*case).check_forward(rotary.prepare_heads, TRUNCATED)


@every
def test_backward(case):
    Case(*case).check_backward(rotary.prepare_heads_backward, TRUNCATED)
