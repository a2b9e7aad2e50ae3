"""What a kernel must know of an FP8 tensor that it writes. It needs only torch, so a model can be built anywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Slot(NamedTuple):
    """One FP8 tensor's part of the scaling state: float32 tensors of one element on the device."""

    scale: Tensor  # the tensor is multiplied by it before the conversion to FP8
    scale_inv: Tensor
    amax: Tensor  # raised to the tensor's largest absolute value
    dtype: torch.dtype  # float8_e4m3fn or float8_e5m2
