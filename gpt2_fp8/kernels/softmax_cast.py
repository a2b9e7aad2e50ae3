"""Softmax cross-entropy whose gradient is written as FP8 in both layouts, for a head with FP8 GEMMs.

There are two kernels over a chunk of logits. The first reads it for each row's log-sum-exp. The second reads it again
and writes (softmax - onehot) times 2^15. No scale must be found, since these values always lie in [-1, 1]. The factor
keeps them below E5M2's largest number (57,344) and resolves probabilities down to 2^-31. The loss's divisor goes into
the GEMMs' scale instead.

Between the kernels a row is described by two numbers: its largest logit and the logarithm of its sum. Added into one
number, they would be rounded to the precision of the larger, and with them every probability of the row.

With z-loss the gradient is softmax (1 + 2 z lse) - onehot. The factor stays. A value saturates beyond 1.75, so only
where a probability is near 1 and z |lse| above 0.375. Nothing bounds lse by itself, but z-loss pulls it towards 0: at
the usual z of 1e-4 it would have to be beyond 3,750. Saturation keeps the direction.

The first kernel is in Triton, the second in CUDA C++ (`cuda/softmax_gradient.cu`).
"""

from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.cast import empty_pair
from gpt2_fp8.kernels.cross_entropy import LANE, LANES, LOG2E, WARPS, row_statistics
from gpt2_fp8.kernels.formats import HEAD_GRADIENT, LOGITS_EXPONENT

TILE, THREADS = 128, 256  # of the second kernel: a block has TILE rows and TILE columns
BLOCKS = 4  # for each multiprocessor


@triton.jit
def _statistics(
    logits, targets, losses, exponents, vocab_size, columns,
    LANES: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    exponents += row * 2
    target = tl.load(targets + row)
    if target < 0:
        tl.store(losses + row, 0.0)
        tl.store(exponents, 0.0)
        tl.store(exponents + 1, float("inf"))  # every probability of the row is then 2^-inf = 0
        return
    maximum, total = row_statistics(logits, vocab_size, LANES, LANE)
    picked = tl.load(logits + target).to(tl.float32)
    tl.store(losses + row, total / LOG2E + (maximum - picked))
    tl.store(exponents, maximum)
    tl.store(exponents + 1, total)


def softmax_statistics(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Compute each row's cross-entropy, float32 [M], and its exponents, float32 [M, 2].

    The exponents are the row's largest logit, and log2 of the sum of the exponentials of logits relative to it. If the
    target is negative, the loss is 0 and the exponents are 0 and inf. logits: bfloat16 [M, N], contiguous; columns from
    `vocab_size` on are ignored. targets: int64 [M].
    """
    assert logits.is_contiguous()
    m, n = logits.shape
    losses = torch.empty(m, dtype=torch.float32, device=logits.device)
    exponents = torch.empty(m, 2, dtype=torch.float32, device=logits.device)
    _statistics[(m,)](logits, targets, losses, exponents, vocab_size, n, LANES=LANES, LANE=LANE, num_warps=WARPS)
    return losses, exponents


def log_sums(exponents: Tensor) -> Tensor:
    """Compute the logarithm of each row's sum of exponentials from its exponents [M, 2]; 0 where there is no target."""
    counted = exponents[:, 1].isfinite()
    return torch.where(counted, exponents[:, 0] + exponents[:, 1] * log(2), 0.0)


def softmax_gradient_cast(
    logits: Tensor, targets: Tensor, exponents: Tensor, vocab_size: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute (softmax(logits) - onehot(targets)) times 2^15, E5M2 [M, N] and its transpose [N, M].

    M and N are multiples of 16. It is 0 in rows whose target is negative and in columns from `vocab_size` on, whatever
    their logits. With `z_loss`, softmax is multiplied by 1 + 2 z_loss lse. `exponents` are those of
    `softmax_statistics`.
    """
    assert all(t.is_contiguous() for t in (logits, targets, exponents))
    assert (logits.dtype, targets.dtype, exponents.dtype) == (torch.bfloat16, torch.int64, torch.float32)
    m, n = logits.shape
    assert m % 16 == n % 16 == 0, (m, n)
    q, qt = empty_pair(m, n, HEAD_GRADIENT, logits.device)
    given = {"E4M3": False, "EXPONENT": LOGITS_EXPONENT, "BLOCKS": BLOCKS}
    given |= {"TILE": TILE, "THREADS": THREADS} | ({"Z_LOSS": 1} if z_loss else {})
    gradient = nvrtc.kernel("softmax_gradient", given, logits.device, THREADS, shared_bytes=0)
    blocks = triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
    gradient(blocks, logits, targets, exponents, q, qt, m, n, vocab_size, *([z_loss] if z_loss else []))
    return q, qt
