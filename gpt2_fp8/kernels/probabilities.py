"""A head's probabilities in FP8 straight from its GEMM, and what their rows need beside them.

The logits are never in memory: 4 of the 8 bytes that each of them costs on the way to its gradient are gone. But a
row's sum of exponentials is not known when its first probability is written. A reference stands for it, one number of a
row, which is near the logarithm of that sum and never above it. The kernel (`cuda/product_probabilities.cu`) writes

    u = 2^EXPONENT exp(logit) / exp(reference)

and sums u by row. E5M2 has the same error at every size, so the reference costs no precision. It costs range: a
probability reaches E5M2's largest number if it is 28 times what the reference expects of the whole row.

**References.** The most frequent targets of a batch have most of the probability in most rows. A GEMM over their logits
alone costs 4 % of the whole head's. A row whose target is a rare id that was expected has its target's logit instead,
and so has one whose input is a rare id that it expects again, as a tied head does early in training: it is the row
before's target. The largest of these is at most the whole sum, less what rounding few logits to bfloat16 may have
added. So probabilities relative to it are never too small, and rarely too large.

**Rows.** The sum of u tells what a row's reference was off by. So its loss is known, and so is the factor that makes u
the gradient. The input's gradient has a row for each row of u, which is multiplied by it afterwards. The weight's
gradient is a sum over rows: there the rows of the head's input are multiplied by it, before they are quantized. u has
no -1 at a row's target. What the stored number lacks there, down to the exact p - 1, is computed in float32 and added
to the results: see `kernels.target_rows`.

A row is set aside if u may have saturated, because ids that its reference did not expect have nearly all of its
probability. It gets 0 here, and is computed again with its own sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels import nvrtc, product
from gpt2_fp8.kernels.cross_entropy import LOG2E, LOWEST
from gpt2_fp8.kernels.formats import EXPONENT, LARGEST
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.product import STAGED, Operands, product_kernel, tensor_map

IDS = 2048  # that stand for all
REFERENCE_WARPS = 4
ROWS, SLABS, WARPS = 32, 64, 4  # what a program of `_rows` holds at once
BLOCK, BLOCK_WARPS = 4096, 16  # rows that `_set_aside`, one program, looks at together


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
    columns = tl.arange(0, COLUMNS)
    a = tl.load(y + row * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    a *= tl.load(y_scale_inv) * tl.load(weight_scale_inv) * LOG2E
    for before in tl.static_range(2):  # its target, and its input
        target = tl.load(targets + row - before, mask=row >= before, other=-1)
        b = tl.load(weight + target * D + columns, mask=(columns < D) & (target >= 0), other=0.0).to(tl.float32)
        log_sum = tl.where(target >= 0, tl.maximum(log_sum, tl.sum(a * b, axis=0)), log_sum)
    tl.store(log_sums + row, log_sum)


def choose_frequent(targets: Tensor, weight: Tensor, vocab_size: int) -> Frequent:
    """Choose the ids that are most often the target, and take their rows of the weight, FP8 [N, d].

    targets: int64 [M]; negative ones do not count. Of equally frequent ids the smaller ones are taken, so the choice is
    the same every time. Columns that no target can be come last.
    """
    counts = torch.zeros(weight.shape[0], dtype=torch.int32, device=targets.device)
    counts.scatter_add_(0, targets.clamp_min(0), (targets >= 0).to(torch.int32))
    ids = counts.sort(descending=True, stable=True).indices[:IDS]
    return Frequent(min(len(ids), vocab_size), weight.view(torch.uint8)[ids].view(weight.dtype))


def compute_references(operands: Operands, targets: Tensor, ids: Frequent) -> Tensor:
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
        IDS=triton.next_power_of_2(few), COLUMNS=triton.next_power_of_2(d), num_warps=REFERENCE_WARPS,
    )  # fmt: skip
    return log_sums


class Probabilities(NamedTuple):
    """The result of `product_probabilities`."""

    q: Tensor  # float8_e5m2 [M, N]: u, 0 in columns that do not count
    qt: Tensor  # float8_e5m2 [N, M]
    sums: Tensor  # float32 [N / COLUMNS, M]: sums of u, before its rounding, over COLUMNS columns of a row
    at_target: Tensor  # float32 [M]: the target's logit in powers of two; undefined without a target


def product_probabilities(operands: Operands, references: Tensor, targets: Tensor, vocab_size: int) -> Probabilities:
    """Compute u of the logits a b^T in both layouts. references: float32 [M], in powers of two. targets: int64 [M].

    Only for operands that `product.fits` with `STAGED`. A value above E5M2's largest number saturates; NaN
    stays NaN.
    """
    a, b, *scales = operands
    m, n = a.shape[0], b.shape[0]
    assert all(t.is_contiguous() for t in (references, targets))
    assert (references.dtype, references.shape) == (torch.float32, (m,)), (references.dtype, references.shape)
    assert (targets.dtype, targets.shape) == (torch.int64, (m,)), (targets.dtype, targets.shape)
    if targets.data_ptr() % 16:  # two are read at once, and those of a single sequence begin 8 bytes into its ids
        targets = targets.clone()
    q = torch.empty(m, n, dtype=torch.float8_e5m2, device=a.device)
    qt = torch.empty(n, m, dtype=torch.float8_e5m2, device=a.device)
    sums = torch.empty(n // product.COLUMNS, m, dtype=torch.float32, device=a.device)
    at_target = torch.empty_like(references)
    kernel, grid = product_kernel("product_probabilities", operands, e4m3=False, staged=STAGED, EXPONENT=EXPONENT)
    kernel(
        grid, tensor_map(a), _transposed_map(qt), b, q, sums, references, targets, at_target, *scales, m, n, vocab_size
    )
    return Probabilities(q, qt, sums, at_target)


def _transposed_map(qt: Tensor) -> object:
    """Describe a tile of qt [N, M] to the copy engine, its columns in the order in which the kernel stages them.

    A thread has 16 neighbouring columns of each 64, two at a time (`cuda/product_probabilities.cu`).
    """
    n, m = qt.shape
    columns = qt.view(torch.uint8).view(n // 64, 4, 8, 2, m).transpose(1, 2)
    return nvrtc.tensor_map(columns, (product.COLUMNS // 64, 8, 4, 2, product.ROWS))


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
