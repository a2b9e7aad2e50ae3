"""What a kernel must know of an FP8 tensor that it writes. Needs torch alone, so that a model can be built anywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Slot(NamedTuple):
    """One FP8 tensor's place in the scaling state; float32 tensors of one element on the device."""

    scale: Tensor  # what the tensor is multiplied by before its cast
    scale_inv: Tensor
    amax: Tensor  # raised to the tensor's largest magnitude
    dtype: torch.dtype  # float8_e4m3fn or float8_e5m2
