"""What E5M2 takes from the gradient of each row's target, for the two GEMMs of a head's backward.

The gradient of the logits is softmax - onehot. At a target that is hardly expected it lies between -1 and -0.9. E5M2
has -1, -0.875 and nothing between them, so a probability below 1/16 is lost there in every row, always in the same
direction. The gradients of the model below have this error in common, which no number of rows averages out.

So the difference between the exact number and the stored one is computed in float32, r [M]. Its part of the input's
gradient is r times the weight's row of the target. Its part of the weight's gradient is the sum of r times the input's
rows, by target. Both are cheap: one number of 50,304 in a row differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cross_entropy import LOG2E

ROWS, COLUMNS, WARPS = 16, 256, 4


@triton.jit
def _rest(logits, targets, exponents, q, loss_weight, q_scale_inv, rows, N, z_loss, Z: tl.constexpr):
    """Compute the exact gradient at each row's target, less what `q` has there; 0 without a target. And the targets."""
    target = tl.load(targets + rows)
    counted = target >= 0
    at = rows.to(tl.int64) * N + tl.where(counted, target, 0)
    x = tl.load(logits + at).to(tl.float32)
    maximum, total = tl.load(exponents + rows * 2), tl.load(exponents + rows * 2 + 1)
    p = tl.exp2((x - maximum) * LOG2E - total)
    if Z:
        p *= 1.0 + 2.0 * z_loss * (maximum + total / LOG2E)
    rest = (p - 1.0) * tl.load(loss_weight) - tl.load(q + at).to(tl.float32) * tl.load(q_scale_inv)
    return tl.where(counted, rest, 0.0), tl.where(counted, target, 0)


@triton.jit
def _operands(weight, inputs, target, rows, D, COLUMNS: tl.constexpr):
    """Load a tile of the weight's rows of the targets, and of the inputs. And the latter's offsets, and which exist.

    Their products are the callers'. Were they formed here, the compiler would fuse other ones with a sum, and round
    elsewhere.
    """
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < D)[None, :]
    here = rows.to(tl.int64)[:, None] * D + columns[None, :]
    w = tl.load(weight + target[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(inputs + here, mask=inside, other=0.0).to(tl.float32)
    return w, y, here, inside


@triton.jit
def _target_rows(
    logits, targets, exponents, q, q_scale_inv, loss_weight, weight, weight_scale_inv, inputs, input_scale_inv,
    to_inputs, to_weight, N, D, z_loss, Z: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rest, target = _rest(logits, targets, exponents, q, loss_weight, q_scale_inv, rows, N, z_loss, Z)
    rest = rest[:, None]
    w, y, here, inside = _operands(weight, inputs, target, rows, D, COLUMNS)
    tl.store(to_inputs + here, rest * (w * tl.load(weight_scale_inv)), mask=inside)
    tl.store(to_weight + here, rest * (y * tl.load(input_scale_inv)), mask=inside)


@triton.jit
def _add_target_rows(
    dy, factors, rest, targets, weight, weight_scale_inv, inputs, input_scale_inv, to_weight, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + rows)
    lacking, factor = tl.load(rest + rows)[:, None], tl.load(factors + rows)[:, None]
    w, y, here, inside = _operands(weight, inputs, tl.where(target >= 0, target, 0), rows, D, COLUMNS)
    made = tl.load(dy + here, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(dy + here, made + lacking * (w * tl.load(weight_scale_inv)), mask=inside)
    tl.store(to_weight + here, lacking * (y * tl.load(input_scale_inv)), mask=inside)


def target_rows(
    logits: Tensor, targets: Tensor, exponents: Tensor, q: tuple[Tensor, Tensor], loss_weight: Tensor,
    weight: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor], z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute what each row adds to the gradients of the head's input and weight, both bfloat16 [M, d].

    The second belongs to the weight's row of the target, the first to the input's own row. Both are 0 in rows whose
    target is negative.

    logits [M, N], targets [M], exponents [M, 2] and q [M, N]: as given to and returned by
    `softmax_cast.softmax_gradient_cast`. weight [N, d] and inputs [M, d]: FP8. These three have their inverse scales
    with them, float32 of one element; that of q makes it the gradient of the loss. loss_weight: float32 of one element,
    what the loss of a row counts. M is a multiple of 16.
    """
    (m, n), d = logits.shape, weight[0].shape[1]
    assert m % ROWS == 0, m
    assert all(t.is_contiguous() for t in (logits, targets, exponents, q[0], weight[0], inputs[0]))
    assert inputs[0].shape == (m, d), (inputs[0].shape, m, d)
    to_inputs, to_weight = (torch.empty(m, d, dtype=torch.bfloat16, device=logits.device) for _ in range(2))
    _target_rows[(m // ROWS, triton.cdiv(d, COLUMNS))](
        logits, targets, exponents, *q, loss_weight, *weight, *inputs, to_inputs, to_weight,
        n, d, z_loss, Z=z_loss > 0, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return to_inputs, to_weight


def add_target_rows(
    dy: Tensor, factors: Tensor, rest: Tensor, targets: Tensor, weight: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """Multiply the rows of dy [M, d] by their factors, and add what the targets have to them, in place.

    Returns what each row adds to the gradient of the weight's row of its target, bfloat16 [M, d].

    dy: bfloat16, of rows without factors. factors, rest: float32 [M], of `probability_rows`; a row's own rest is what
    its gradient lacks at its target. weight, inputs: as in `target_rows`. M is a multiple of 16.
    """
    m, d = dy.shape
    assert m % ROWS == 0, m
    assert all(t.is_contiguous() for t in (dy, factors, rest, targets, weight[0], inputs[0]))
    assert inputs[0].shape == dy.shape, (inputs[0].shape, dy.shape)
    to_weight = torch.empty_like(dy)
    _add_target_rows[(m // ROWS, triton.cdiv(d, COLUMNS))](
        dy, factors, rest, targets, *weight, *inputs, to_weight, d, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )  # fmt: skip
    return to_weight
