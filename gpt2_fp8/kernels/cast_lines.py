"""Quantization in CUDA C++ (`cuda/cast.cu`).

A block makes one tile of whole lines of memory in either layout. It issues all its loads before it computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.slot import Slot

TILE, THREADS = 128, 256  # a block has TILE rows and TILE columns
BLOCKS = {torch.bfloat16: 4, torch.float32: 3}  # for each multiprocessor, limited by its registers


def fits(x: Tensor) -> bool:
    """Return whether this kernel can quantize x [M, N]: it reads 16 bytes at a time."""
    m, n = x.shape
    return m % 16 == n % 16 == x.data_ptr() % 16 == 0 and nvrtc.missing() is None


def cast(x: Tensor, slot: Slot, q: Tensor, qt: Tensor, sums: bool) -> Tensor:
    """Quantize x into q and qt; return the partial column sums, empty unless `sums`. See `cast.cast_transpose`."""
    m, n = x.shape
    down = -(-m // TILE)
    partial = torch.empty((down, n) if sums else 0, dtype=torch.float32, device=x.device)
    blocks = BLOCKS[x.dtype]
    given = {"TILE": TILE, "THREADS": THREADS, "BLOCKS": blocks, "E4M3": slot.dtype == torch.float8_e4m3fn}
    given |= {"FLOAT32": x.dtype == torch.float32, "SUMS": sums}
    launch = nvrtc.kernel("cast", given, x.device, THREADS, shared_bytes=0)
    launch(down * -(-n // TILE), x, q, qt, partial, slot.scale, slot.amax, m, n)
    return partial
