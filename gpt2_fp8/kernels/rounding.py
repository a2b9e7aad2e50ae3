"""What rounding to FP8 takes from the sum of many numbers.

Between two powers of two the numbers of a format are equally far apart. Numbers of every size have a part in the sum of
a softmax, and the parts of equal intervals of the logarithm are nearly equal. Then more lies in the lower half of each
interval that is rounded to one number than in the upper half. So rounding to nearest takes more than it adds, and no
sum is long enough to average that out.
"""

from __future__ import annotations

from math import log

import torch

_MANTISSA = {torch.float8_e5m2: 2, torch.float8_e4m3fn: 3}  # bits


def mean_of_rounded(dtype: torch.dtype) -> float:
    """Return the sum of numbers rounded to an FP8 format, as a part of their own sum.

    It is the mean of round(x) / x over an octave of evenly spread log(x): 0.9972 for E5M2 and 0.9993 for E4M3.
    """
    steps = 2 ** _MANTISSA[dtype]
    # the borders of what is rounded to 1, 1 + 1 / steps, ...; below 1 numbers are half as far apart
    borders = [1 - 1 / (4 * steps), *(1 + (2 * k + 1) / (2 * steps) for k in range(steps))]
    return sum((1 + k / steps) * (1 / borders[k] - 1 / borders[k + 1]) for k in range(steps)) / log(2)
