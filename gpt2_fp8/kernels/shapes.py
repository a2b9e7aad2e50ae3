"""Which shapes the kernels in CUDA C++ support, and how they use a multiprocessor for them.

This is only arithmetic. It needs neither Triton nor a GPU, so a run can report which kernels it will use.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

SHARED_BYTES = 228 * 1024  # of a multiprocessor on Hopper; the system takes 1 KiB for each block

# GEMMs whose tiles go through an epilogue (`product_gelu`, `product_logits`)
ROWS, COLUMNS, LINE = 64, 128, 128  # of a tile; LINE: bytes copied together; as in `cuda/product.cuh`
WARPGROUPS = 3  # that multiply, and hide each other's epilogues
FEWEST_STAGES, MOST_STAGES = 4, 7  # with fewer, tensor cores wait for memory: no faster than two kernels

# Normalisation over whole rows (`layer_norm_rows`)
WIDEST_COLUMNS = 2048  # at 4,096, where few rows fit at once, it was slower than `layer_norm_tiles`


class ProductShape(NamedTuple):
    """How a GEMM's kernel uses a multiprocessor for one inner dimension."""

    stages: int  # lines of a tile that are loaded or being loaded, for each warp group
    shared_bytes: int


@cache
def product(k: int) -> ProductShape:
    """Return a shape with as many stages as there is room for."""
    stage, rest = ROWS * LINE + 16, COLUMNS * k  # 16: two barriers
    stages = min((SHARED_BYTES - 1024 - rest) // WARPGROUPS // stage, MOST_STAGES)
    return ProductShape(stages, rest + WARPGROUPS * stages * stage)


@cache
def why_no_product(m: int, n: int, k: int) -> str | None:
    """Return why a GEMM [m, k] times [n, k]^T has no kernel with an epilogue; None if it has one.

    The kernel takes whole tiles, and keeps a slab of its second operand in shared memory. `kernels.weight_gradient`
    takes the gradients of these GEMMs' weights, whatever fits here.
    """
    for size, part, name in ((m, ROWS, "rows"), (n, COLUMNS, "columns"), (k, LINE, "channels")):
        if size % part:
            return f"{size:,} {name} are no multiple of {part}"
    if product(k).stages < FEWEST_STAGES:
        return f"{k:,} channels leave too little shared memory"
    return None
