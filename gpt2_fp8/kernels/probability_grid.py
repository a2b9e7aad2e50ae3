"""The numbers in which the gradient of a head's logits is stored in FP8: factors, and the ids of rows' references.

Of logits that are stored, the gradient is (softmax - onehot) times `GRADIENT_SCALE`. Otherwise it is probabilities
times 2^`EXPONENT`, and a row's probabilities are relative to a reference of its own (`kernels.references`). Then the
grid of E5M2's numbers is another one in every row. This is plain torch, for the kernels and for their emulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

# u of a row whose reference is exact lies below 2^11. It is at least 2^-16, E5M2's smallest number, from 2^-27 on.
EXPONENT = 11

# The format of the logits' gradient, whatever the blocks' is. Its values reach from 1 down to the probabilities of rare
# tokens. E4M3 rounds values below 2^-18 to 0: half of a vocabulary or more. Nothing would then push those tokens down.
GRADIENT = torch.float8_e5m2
# The factor by which values in [-1, 1] are multiplied before the conversion to FP8.
GRADIENT_SCALE = {torch.float8_e5m2: 2.0**15, torch.float8_e4m3fn: 2.0**8}
IDS = 2048  # that stand for all


def frequent_ids(targets: Tensor, columns: int) -> Tensor:
    """Choose the ids below `columns` that are most often the target, int64 [at most IDS], the most frequent first.

    targets: int64 [M]; negative ones do not count. Of equally frequent ids the smaller ones are taken, so the choice is
    the same every time. Columns that no target can be come last.
    """
    counts = torch.zeros(columns, dtype=torch.int32, device=targets.device)
    counts.scatter_add_(0, targets.clamp_min(0), (targets >= 0).to(torch.int32))
    return counts.sort(descending=True, stable=True).indices[:IDS]
