"""What the rows of a head's probabilities need beside them, after `kernels.product_probabilities`.

A row of its result is u, probabilities times 2^EXPONENT and times what the row's reference was off by. The sum of u
tells the latter. So a row's loss is known now, and so is the factor that makes u the gradient. The input's gradient has
a row for each row of u, which is multiplied by it afterwards. The weight's gradient is a sum over rows: there the rows
of the head's input are multiplied by it, before they are quantized.

u has no -1 at a row's target. What the stored number lacks there, down to the exact p - 1, is computed in float32 and
added to the results: see `kernels.target_rows`.

A row is set aside if u may have saturated, because ids that its reference did not expect have nearly all of its
probability. It gets 0 here, and is computed again with its own sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cross_entropy import LOG2E
from gpt2_fp8.kernels.probability_grid import EXPONENT
from gpt2_fp8.kernels.product_probabilities import Probabilities
from gpt2_fp8.kernels.slot import LARGEST

ROWS, SLABS, WARPS = 32, 64, 4  # what a program of the first kernel holds at once
BLOCK, BLOCK_WARPS = 4096, 16  # rows that the second kernel, one program, looks at together


class Rows(NamedTuple):
    """What is known of each row, float32 [M]; all of it is 0 for a row without a target, or set aside."""

    losses: Tensor
    log_sums: Tensor  # natural logarithm of the sum of exponentials
    factors: Tensor  # u times this, 2^-EXPONENT and a row's share in the loss is the gradient but for the target
    rest: Tensor  # what the gradient of the loss lacks at the target


class Aside(NamedTuple):
    """Rows that are set aside, as many as there is room for; the others of these have the row 0 and the target -1."""

    rows: Tensor  # int64 [room]
    targets: Tensor  # int64 [room]
    found: Tensor  # int32 [1]: how many there were, whatever the room


@triton.jit
def _rows(
    q, sums, at_target, references, targets, loss_weight, q_scale_inv, losses, log_sums, factors, rest, largest_out,
    slabs, M, N, z_loss, EXPONENT: tl.constexpr, Z: tl.constexpr, ROWS: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    total, largest = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, slabs, SLABS):
        slab = start + tl.arange(0, SLABS)
        mask = (slab < slabs)[:, None] & inside[None, :]
        part = tl.load(sums + slab.to(tl.int64)[:, None] * M + rows[None, :], mask=mask, other=0.0)
        total += tl.sum(part, axis=0)
        largest = tl.maximum(largest, tl.max(part, axis=0))
    target = tl.load(targets + rows, mask=inside, other=-1)
    counted = target >= 0
    logit = tl.load(at_target + rows, mask=inside, other=0.0)
    log_sum = tl.load(references + rows, mask=inside, other=0.0) + tl.log2(total) - EXPONENT
    factor = 2.0**EXPONENT / total
    p = tl.exp2(logit - log_sum)
    if Z:
        more = 1.0 + 2.0 * z_loss * (log_sum / LOG2E)
        factor *= more
        p *= more
    stored = tl.load(q + rows.to(tl.int64) * N + tl.where(counted, target, 0), mask=inside, other=0.0).to(tl.float32)
    lacking = (p - 1.0) * tl.load(loss_weight) - stored * factor * tl.load(q_scale_inv)
    tl.store(losses + rows, tl.where(counted, (log_sum - logit) / LOG2E, 0.0), mask=inside)
    tl.store(log_sums + rows, tl.where(counted, log_sum / LOG2E, 0.0), mask=inside)
    tl.store(factors + rows, tl.where(counted, factor, 0.0), mask=inside)
    tl.store(rest + rows, tl.where(counted, lacking, 0.0), mask=inside)
    tl.store(largest_out + rows, tl.where(counted, largest, 0.0), mask=inside)


@triton.jit
def _set_aside(
    largest, targets, losses, log_sums, factors, rest, aside, aside_targets, count, M, room,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the rows whose `largest` is above LIMIT, in order, and clear what is known of those that are listed."""
    lanes = tl.arange(0, BLOCK)
    tl.store(aside + lanes, tl.zeros([BLOCK], tl.int64), mask=lanes < room)
    tl.store(aside_targets + lanes, tl.full([BLOCK], -1, tl.int64), mask=lanes < room)
    tl.debug_barrier()  # other threads write over these
    found = 0
    for start in range(0, M, BLOCK):
        rows = start + lanes
        far = tl.load(largest + rows, mask=rows < M, other=0.0) > LIMIT
        place = found + tl.cumsum(far.to(tl.int32), axis=0) - 1
        listed = far & (place < room)
        tl.store(aside + place, rows.to(tl.int64), mask=listed)
        tl.store(aside_targets + place, tl.load(targets + rows, mask=listed, other=-1), mask=listed)
        tl.store(losses + rows, 0.0, mask=listed)
        tl.store(log_sums + rows, 0.0, mask=listed)
        tl.store(factors + rows, 0.0, mask=listed)
        tl.store(rest + rows, 0.0, mask=listed)
        found += tl.sum(far.to(tl.int32), axis=0)
    tl.store(count, found)


def probability_rows(
    made: Probabilities, references: Tensor, targets: Tensor, loss_weight: Tensor, q_scale_inv: Tensor, room: int,
    z_loss: float = 0.0,
) -> tuple[Rows, Aside]:  # fmt: skip
    """Compute what is known of each row, and set aside up to `room` rows that may have saturated.

    targets: int64 [M]. loss_weight, q_scale_inv: float32 of one element: what the loss of a row counts, and what makes
    u times a row's factor the gradient of the loss. With `z_loss`, probabilities count 1 + 2 z_loss lse times.
    """
    (slabs, m), n = made.sums.shape, made.q.shape[1]
    assert all(t.is_contiguous() for t in (*made, references, targets))
    assert room <= BLOCK, room
    known = Rows(*(torch.empty(m, dtype=torch.float32, device=targets.device) for _ in Rows._fields))
    largest = torch.empty_like(known.losses)
    _rows[(triton.cdiv(m, ROWS),)](
        made.q, made.sums, made.at_target, references, targets, loss_weight, q_scale_inv, *known, largest,
        slabs, m, n, z_loss, EXPONENT=EXPONENT, Z=z_loss > 0, ROWS=ROWS, SLABS=SLABS, num_warps=WARPS,
    )  # fmt: skip
    rows, left = torch.empty(2, room, dtype=torch.int64, device=targets.device)
    aside = Aside(rows, left, torch.empty(1, dtype=torch.int32, device=targets.device))
    limit = LARGEST[made.q.dtype]
    _set_aside[(1,)](largest, targets, *known, *aside, m, room, LIMIT=limit, BLOCK=BLOCK, num_warps=BLOCK_WARPS)
    return known, aside
