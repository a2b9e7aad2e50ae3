"""What stands for a row's sum of exponentials before it is known: the part of it that few ids have.

The most frequent targets of a batch have most of the probability in most rows. A GEMM over their logits alone costs 4 %
of the whole head's. A row whose target is a rare id that was expected has its target's logit instead. The larger of
both is at most the whole sum, less what rounding few logits to bfloat16 may have added. So probabilities relative to it
are never too small, and rarely too large.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cross_entropy import LOG2E, LOWEST
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.probability_grid import frequent_ids
from gpt2_fp8.kernels.product_gelu import Operands

WARPS = 4


class Frequent(NamedTuple):
    """The ids that stand for all: how many of them count, and their rows of the weight."""

    counted: int
    weight: Tensor  # FP8 [ids, d]


@triton.jit
def _references(
    logits, y, weight, targets, y_scale_inv, weight_scale_inv, log_sums, ids, count, D,
    IDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, IDS)
    x = tl.load(logits + row * ids + lanes, mask=lanes < count, other=-float("inf")).to(tl.float32)
    largest = tl.maximum(tl.max(x, axis=0), LOWEST)
    log_sum = largest * LOG2E + tl.log2(tl.sum(tl.exp2((x - largest) * LOG2E), axis=0))
    log_sum -= tl.abs(largest) * (LOG2E / 256)
    target = tl.load(targets + row)
    columns = tl.arange(0, COLUMNS)
    inside = (columns < D) & (target >= 0)
    a = tl.load(y + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(weight + target * D + columns, mask=inside, other=0.0).to(tl.float32)
    logit = tl.sum(a * b, axis=0) * (tl.load(y_scale_inv) * tl.load(weight_scale_inv)) * LOG2E
    tl.store(log_sums + row, tl.where(target >= 0, tl.maximum(log_sum, logit), log_sum))


def frequent(targets: Tensor, weight: Tensor, vocab_size: int) -> Frequent:
    """Choose the ids that are most often the target, and take their rows of the weight, FP8 [N, d].

    targets: int64 [M]; negative ones do not count.
    """
    ids = frequent_ids(targets, weight.shape[0])
    return Frequent(min(len(ids), vocab_size), weight.view(torch.uint8)[ids].view(weight.dtype))


def references(operands: Operands, targets: Tensor, ids: Frequent) -> Tensor:
    """Compute the references of a head's rows, float32 [M]: at most log2 of the row's sum of exponentials.

    operands: those of its GEMM. targets: int64 [M].
    """
    y, weight, *scales = operands
    (m, d), few = y.shape, len(ids.weight)
    logits = torch.empty(m, few, dtype=torch.bfloat16, device=y.device)
    matmul(y, ids.weight, logits, *scales, fast_accumulate=True)
    log_sums = torch.empty(m, dtype=torch.float32, device=y.device)
    _references[(m,)](
        logits, y, weight, targets, *scales, log_sums, few, ids.counted, d,
        IDS=triton.next_power_of_2(few), COLUMNS=triton.next_power_of_2(d), num_warps=WARPS,
    )  # fmt: skip
    return log_sums
