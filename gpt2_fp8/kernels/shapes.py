"""Which shapes the kernels in CUDA C++ take, and how they use a multiprocessor for them. Arithmetic alone: it needs
neither Triton nor a GPU, so that a run can say what it will run with."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

SHARED_BYTES = 228 * 1024  # of a multiprocessor on Hopper; the system takes 1 KiB for each block

# Products whose tiles go through an epilogue (`product_gelu`, `product_logits`)
ROWS, COLUMNS, LINE = 64, 128, 128  # of a tile; bytes that are copied together: as in `cuda/product.cuh`
FEWEST_STAGES, MOST_STAGES = 4, 7  # with fewer, tensor cores wait for memory: no faster than a product and a kernel

# Normalisation over whole rows (`layer_norm_rows`)
WIDEST = 2048  # columns; at 4,096, where few rows fit at once, it was slower than `layer_norm_tiles`


class ProductShape(NamedTuple):
    """How a product's kernel uses a multiprocessor for one inner dimension."""

    warpgroups: int  # that multiply
    stages: int  # lines of a tile at hand or on their way, for each of them
    shared_bytes: int


@cache
def _shape(k: int, warpgroups: int, turned: int) -> ProductShape:
    """As many stages as there is room for. `turned`: bytes of a warp group's tile that leaves transposed."""
    stage, rest = ROWS * LINE + 16, COLUMNS * k  # 16: two barriers
    stages = min(((SHARED_BYTES - 1024 - rest) // warpgroups - turned) // stage, MOST_STAGES)
    return ProductShape(warpgroups, stages, rest + warpgroups * (turned + stages * stage))


def forward(k: int) -> ProductShape:
    """Measured on an H200, as the one below: three warp groups hide each other's epilogues; an epilogue that holds more
    in registers and shared memory leaves room for two."""
    return _shape(k, 3, turned=16)


def backward(k: int) -> ProductShape:
    """See `forward`."""
    return _shape(k, 2, turned=ROWS * COLUMNS)


@cache
def why_no_product(m: int, n: int, k: int) -> str | None:
    """Why a product [m, k] times [n, k]^T has no kernel with an epilogue, or None where it has one: it takes whole
    tiles, and a slab of its second operand in shared memory."""
    for size, part, name in ((m, ROWS, "rows"), (n, COLUMNS, "columns"), (k, LINE, "channels")):
        if size % part:
            return f"{size:,} {name} are no multiple of {part}"
    if min(forward(k).stages, backward(k).stages) < FEWEST_STAGES:
        return f"{k:,} channels leave too little shared memory"
    return None
