"""A weight's gradient in FP8 from one operand as it is and one transposed, in CUDA C++ (`cuda/weight_gradient.cu`).

cuBLASLt wants both transposed. So a kernel that makes such an operand writes it twice, for its other GEMM as it is. At
65,536 x 3,072 x 768 this GEMM takes 0.02 to 0.04 ms longer than cuBLASLt's 0.25, and spares a tensor of 201 MB. Partial
sums are promoted to float32, to the same error. Every call gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc, segments
from gpt2_fp8.kernels.gemm import E5M2, PAIRS

# as in the kernel: rows multiplied together; a tile's columns of a, in one block, and of b; the blocks of a cluster
BLOCK, ROWS, COLUMNS, CLUSTER = 128, 128, 256, 2
STAGES, THREADS = 4, 384
SHARED_BYTES = STAGES * (BLOCK * (ROWS + COLUMNS) + 16)  # 16: two barriers


class _Work(NamedTuple):
    """What the clusters have to do for one shape, on its device."""

    rows: Tensor  # int32 [segments, 8]; see `Segment` in the kernel
    starts: Tensor  # int32 [clusters + 1]
    tiles: int
    slots: int
    blocks: int  # of threads


@cache
def _work(n: int, d: int, m: int, device: torch.device) -> _Work:
    clusters, across = nvrtc.processors(device) // CLUSTER, -(-d // COLUMNS)
    tiles = -(-n // (ROWS * CLUSTER)) * across
    found, starts, slots = segments.table(segments.plan(tiles, -(-m // BLOCK), clusters))
    rows = [(tile // across * ROWS * CLUSTER, tile % across * COLUMNS, *rest, tile) for tile, *rest in found]
    on_device, starts_there = (torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, starts))
    return _Work(on_device, starts_there, tiles, slots, clusters * CLUSTER)


def weight_gradient(
    a: Tensor, bt: Tensor, out: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor,
    *, transposed: bool = False, add: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute out = (a^T bt^T) * a_scale_inv * b_scale_inv [+ add], on the current stream.

    a: [M, N], bt: [D, M], each float8_e4m3fn or float8_e5m2, not both the latter. M is a multiple of 64, N and D are of
    128. out: float32 [N, D], or [D, N] if `transposed`, written in place and returned. a_scale_inv, b_scale_inv:
    float32, one element. add: as `out`; `out` itself to accumulate in place.

    The first call of a shape copies a table to the device. So capture it in a CUDA graph after one call outside.
    """
    (m, n), d = a.shape, bt.shape[0]
    assert bt.shape[1] == m, (a.shape, bt.shape)
    assert (a.dtype, bt.dtype) in PAIRS, (a.dtype, bt.dtype)
    assert m % 64 == n % 128 == d % 128 == 0, (m, n, d)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (a, bt)), "whole boxes at multiples of 16 bytes"
    for t in (out,) if add is None else (out, add):
        assert (t.dtype, t.shape) == (torch.float32, (d, n) if transposed else (n, d)), (t.dtype, t.shape)
        assert t.is_contiguous()
        assert t.data_ptr() % 16 == 0
    assert all(t.dtype == torch.float32 and t.numel() == 1 for t in (a_scale_inv, b_scale_inv))
    work = _work(n, d, m, a.device)
    given = {"E4M3": True, "A_E5M2": a.dtype == E5M2, "B_E5M2": bt.dtype == E5M2, "TRANSPOSED": transposed}
    kernel = nvrtc.kernel("weight_gradient", given, a.device, THREADS, SHARED_BYTES)
    maps = (
        nvrtc.tensor_map(a.view(torch.uint8), (BLOCK, ROWS)),
        nvrtc.tensor_map(bt.view(torch.uint8), (COLUMNS // CLUSTER, BLOCK)),
    )
    waiting = torch.empty(work.slots, CLUSTER * ROWS * COLUMNS, dtype=torch.float32, device=a.device)
    arrived = torch.zeros(work.tiles * CLUSTER, dtype=torch.int32, device=a.device)
    kernel(
        work.blocks, *maps, work.rows, work.starts, waiting, arrived, out, add, a_scale_inv, b_scale_inv, n, d
    )  # fmt: skip
    return out
