"""The cast in CUDA C++ (`cuda/cast.cu`): a block makes one tile of whole lines of memory in either layout, and asks for
all that it reads before it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.slot import Slot

TILE, THREADS = 128, 256  # a block has TILE rows and as many columns
BLOCKS = {torch.bfloat16: 4, torch.float32: 3}  # a multiprocessor, by what registers there are


def fits(x: Tensor) -> bool:
    """Whether x [M, N] can be cast here: it is read 16 bytes at a time."""
    m, n = x.shape
    return m % 16 == n % 16 == x.data_ptr() % 16 == 0 and nvrtc.missing() is None


def cast(x: Tensor, slot: Slot, q: Tensor, qt: Tensor, sums: bool) -> Tensor:
    """See `cast.cast_transpose`: x into q and qt. Gives the partial column sums; empty unless `sums`."""
    m, n = x.shape
    down = -(-m // TILE)
    partial = torch.empty((down, n) if sums else 0, dtype=torch.float32, device=x.device)
    blocks = BLOCKS[x.dtype]
    given = {"TILE": TILE, "THREADS": THREADS, "BLOCKS": blocks, "E4M3": slot.dtype == torch.float8_e4m3fn}
    given |= {"FLOAT32": x.dtype == torch.float32, "SUMS": sums}
    launch = nvrtc.kernel("cast", given, x.device, THREADS, shared_bytes=0)
    launch(down * -(-n // TILE), x, q, qt, partial, slot.scale, slot.amax, m, n)
    return partial
