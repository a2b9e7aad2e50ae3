"""What a kernel must know of FP8: ranges, a tensor's scale and amax, and the factors of the head's gradient.

It needs only torch, so a model can be built anywhere.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_MANTISSA = {torch.float8_e5m2: 2, torch.float8_e4m3fn: 3}  # bits

# The format of the logits' gradient, whatever the blocks' is. Its values reach from 1 down to the probabilities of rare
# tokens. E4M3 rounds values below 2^-18 to 0: half of a vocabulary or more. Nothing would then push those tokens down.
HEAD_GRADIENT = torch.float8_e5m2
# The gradient of logits that are stored is (softmax - onehot), in [-1, 1], times 2^LOGITS_EXPONENT.
LOGITS_EXPONENT = 15
# Without logits it is probabilities times 2^EXPONENT, relative to a reference of their row (`kernels.probabilities`).
# Of an exact reference they lie below 2^11. They are at least 2^-16, E5M2's smallest number, from 2^-27 on.
EXPONENT = 11


class Slot(NamedTuple):
    """One FP8 tensor's part of the scaling state: float32 tensors of one element on the device."""

    scale: Tensor  # the tensor is multiplied by it before the conversion to FP8
    scale_inv: Tensor
    amax: Tensor  # raised to the tensor's largest absolute value
    dtype: torch.dtype  # float8_e4m3fn or float8_e5m2


def mean_of_rounded(dtype: torch.dtype) -> float:
    """Return the sum of numbers rounded to an FP8 format, as a part of their own sum: 0.9972 for E5M2, 0.9993 for E4M3.

    The numbers of a softmax have every size: log(x) is evenly spread, so more of them lie in the lower half of each
    interval that is rounded to one number than in the upper half. Rounding to nearest takes more than it adds, and no
    sum is long enough to average that out. This is the mean of round(x) / x over an octave.
    """
    steps = 2 ** _MANTISSA[dtype]
    # the borders of what is rounded to 1, 1 + 1 / steps, ...; below 1 numbers are half as far apart
    borders = [1 - 1 / (4 * steps), *(1 + (2 * k + 1) / (2 * steps) for k in range(steps))]
    return sum((1 + k / steps) * (1 / borders[k] - 1 / borders[k + 1]) for k in range(steps)) / log(2)
