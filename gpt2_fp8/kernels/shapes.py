"""Which shapes the kernels in CUDA C++ support, and how they use a multiprocessor for them.

This is only arithmetic. It needs neither Triton nor a GPU, so a run can report which kernels it will use.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

SHARED_BYTES = 228 * 1024  # of a multiprocessor on Hopper; the system takes 1 KiB for each block

# GEMMs whose tiles go through an epilogue (`product_gelu`, `product_logits`, `product_probabilities`)
ROWS, COLUMNS, LINE = 64, 128, 128  # of a tile; LINE: bytes copied together; as in `cuda/product.cuh`
WARPGROUPS = 3  # that multiply, and hide each other's epilogues
FEWEST_STAGES, MOST_STAGES = 4, 7  # with fewer, tensor cores wait for memory: no faster than two kernels

# A head without logits (`product_probabilities`)
STAGED = ROWS * COLUMNS  # bytes of a tile whose transpose waits in shared memory, for each warp group
FEWEST_STAGED = 3  # stages; with three it is as fast as `product_logits` with four
FEWEST_ROWS = 16384  # of a micro-batch; in smaller ones the rows' references cost more than the logits

# Normalisation over whole rows (`layer_norm_rows`)
WIDEST_COLUMNS = 2048  # at 4,096, where few rows fit at once, it was slower than `layer_norm_tiles`


class ProductShape(NamedTuple):
    """How a GEMM's kernel uses a multiprocessor for one inner dimension."""

    stages: int  # lines of a tile that are loaded or being loaded, for each warp group
    shared_bytes: int


@cache
def product(k: int, staged: int = 0) -> ProductShape:
    """Return a shape with as many stages as there is room for, beside `staged` bytes for each warp group's results."""
    stage, rest = ROWS * LINE + 16, COLUMNS * k + WARPGROUPS * staged  # 16: two barriers
    stages = min((SHARED_BYTES - 1024 - rest) // WARPGROUPS // stage, MOST_STAGES)
    return ProductShape(stages, rest + WARPGROUPS * stages * stage)


@cache
def why_no_product(m: int, n: int, k: int, staged: int = 0) -> str | None:
    """Return why a GEMM [m, k] times [n, k]^T has no kernel with an epilogue; None if it has one.

    The kernel takes whole tiles, and keeps a slab of its second operand in shared memory. `kernels.weight_gradient`
    takes the gradients of these GEMMs' weights, whatever fits here. `staged`: as in `product`.
    """
    for size, part, name in ((m, ROWS, "rows"), (n, COLUMNS, "columns"), (k, LINE, "channels")):
        if size % part:
            return f"{size:,} {name} are no multiple of {part}"
    if product(k, staged).stages < (FEWEST_STAGED if staged else FEWEST_STAGES):
        return f"{k:,} channels leave too little shared memory"
    return None


def why_logits(rows: int, n: int, k: int) -> str | None:
    """Return why the logits [rows, n] of k channels are stored in training; None if they are never in memory."""
    if rows < FEWEST_ROWS:
        return f"fewer than {FEWEST_ROWS:,} rows"
    return why_no_product(rows, n, k, STAGED)
