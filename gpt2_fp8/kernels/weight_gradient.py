"""A weight's gradient in FP8 from one operand as it is and one transposed, in CUDA C++ (`cuda/weight_gradient.cu`).

cuBLASLt wants both transposed. So a kernel that makes such an operand writes it twice, for its other GEMM as it is. At
65,536 x 3,072 x 768 this GEMM takes 0.02 to 0.04 ms longer than cuBLASLt's 0.25, and spares a tensor of 201 MB. Partial
sums are promoted to float32, to the same error. Every call gives the same bits.

`plan_segments` says which part of which tile each cluster multiplies, and in which order. A tile's summed dimension has
`blocks` blocks of 128 rows. A segment is a run of them. One segment of each tile is its owner's. The other clusters
leave their sums in memory, and the owner adds them.

Clusters walk through the summed dimension together. So what one fetches from memory, others find in the second-level
cache. With T tiles and s T + R clusters, s teams of T clusters have a window of it each, and R clusters share what is
left. The first team owns the tiles, and starts to add when the others have left their sums.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.gemm import E5M2, PAIRS

# rows multiplied together; a tile's columns of a, in one block, and of b; the blocks of a cluster
BLOCK, ROWS, COLUMNS, CLUSTER = 128, 128, 256, 2
STAGES, THREADS = 4, 384
SHARED_BYTES = STAGES * (BLOCK * (ROWS + COLUMNS) + 16)  # 16: two barriers

_TILE = {"BLOCK": BLOCK, "ROWS": ROWS, "COLUMNS": COLUMNS, "CLUSTER": CLUSTER, "STAGES": STAGES}
LEAVE, ADD, WRITE = 2.5, 2.5, 3.0  # costs in blocks: to leave a segment's sums, to add them, to write a tile
FEWEST_BLOCKS = 2  # of a window


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
    found, starts, slots = tabulate(plan_segments(tiles, -(-m // BLOCK), clusters))
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
    results = (out,) if add is None else (out, add)
    assert all((t.dtype, t.shape) == (torch.float32, (d, n) if transposed else (n, d)) for t in results)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (a, bt, *results)), "at multiples of 16 bytes"
    assert all(t.dtype == torch.float32 and t.numel() == 1 for t in (a_scale_inv, b_scale_inv))
    work = _work(n, d, m, a.device)
    given = _TILE | {"E4M3": True, "A_E5M2": a.dtype == E5M2, "B_E5M2": bt.dtype == E5M2, "TRANSPOSED": transposed}
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


class Segment(NamedTuple):
    """Blocks `first` .. `last` - 1 of a tile."""

    tile: int
    first: int
    last: int
    owner: bool


def plan_segments(tiles: int, blocks: int, clusters: int) -> list[list[Segment]]:
    """Return each cluster's segments in their order.

    A cluster only waits for those before it. So nobody waits for ever, however few run at the same time.
    """
    lists = (
        _divide_among_teams(tiles, blocks, clusters) if clusters >= tiles else _cut_into_runs(tiles, blocks, clusters)
    )
    return lists[::-1]


def tabulate(lists: list[list[Segment]]) -> tuple[list[list[int]], list[int], int]:
    """Return the kernel's table of segments, where each cluster's begin in it, and the number of slots.

    A row is: tile, first, last, slot (-1: the owner's), the first slot of its tile, how many it has. Slots are in the
    order of tiles and blocks.
    """
    left = sorted(s for mine in lists for s in mine if not s.owner)
    slots = {segment: slot for slot, segment in enumerate(left)}
    counts = Counter(segment.tile for segment in left)
    first_slots = {segment.tile: slot for slot, segment in reversed([*enumerate(left)])}
    rows = [
        [s.tile, s.first, s.last, slots.get(s, -1), first_slots.get(s.tile, 0), counts[s.tile]]
        for mine in lists
        for s in mine
    ]
    return rows, [0, *accumulate(map(len, lists))], len(left)


def _cut_into_runs(tiles: int, blocks: int, clusters: int) -> list[list[Segment]]:
    """Cut the tiles, one after the other, into equal runs: for more tiles than clusters."""
    lists = []
    for c in range(clusters):
        at, end = (number * tiles * blocks // clusters for number in (c, c + 1))
        mine = []
        while at < end:
            tile, first = divmod(at, blocks)
            last = min(blocks, first + end - at)
            mine.append(Segment(tile, first, last, owner=first == 0))
            at += last - first
        lists.append(mine)
    return lists


def _divide_among_teams(tiles: int, blocks: int, clusters: int) -> list[list[Segment]]:
    """Divide the blocks among teams, and a rest of clusters, as the module describes."""
    teams, rest = divmod(clusters, tiles)
    own, window = _find_windows(tiles, blocks, teams, rest)
    lists: list[list[Segment]] = [[] for _ in range(clusters)]
    ends = []  # of what teams have of each tile
    for tile in range(tiles):
        end = 0
        for team in range(teams):
            at, end = end, min(blocks, round(own[tile] + team * window))
            if team == teams - 1 and not rest:
                end = blocks
            if end > at:
                lists[team * tiles + tile].append(Segment(tile, at, end, owner=team == 0))
        ends.append(end)
    if rest:
        _share(lists[teams * tiles :], ends, blocks)
    return lists


def _count_cut(tiles: int, rest: int) -> int:
    """Return how many tiles, the last ones, have their last window cut: those too many for an equal deal."""
    return tiles % rest if rest else 0


def _find_windows(tiles: int, blocks: int, teams: int, rest: int) -> tuple[list[float], float]:
    """Return how much owners multiply of each tile, and each team after them, so that all end at the same time."""
    cut = _count_cut(tiles, rest)
    pieces = -(-(rest + cut - 1) // cut) if cut else 0  # of a tile that is cut, at most
    helpers = [teams - 1 + (pieces if rest and tile >= tiles - cut else rest > 0) for tile in range(tiles)]
    segments = tiles - cut + (rest + cut - 1 if cut else 0)

    def ending_at(time: float) -> tuple[list[float], float, bool]:
        own = [min(blocks, max(FEWEST_BLOCKS, time - WRITE - n * ADD)) for n in helpers]
        window = max(FEWEST_BLOCKS, time - WRITE - teams * ADD - LEAVE)
        left = [max(0, blocks - o - (teams - 1) * window) for o in own]
        room = rest * (time - WRITE - ADD) - segments * LEAVE if rest else 0
        return own, window, sum(left) <= room

    low, high = 0.0, 4.0 * blocks
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if ending_at(middle)[2] else (middle, high)
    own, window, _ = ending_at(high)
    return own, window


def _share(lists: list[list[Segment]], ends: list[int], blocks: int) -> None:
    """Deal out what is left of each tile: first a part of those that are cut, then whole windows."""
    rest, tiles = len(lists), len(ends)
    whole = tiles - _count_cut(tiles, rest)
    pieces = [(tile, block) for tile in range(whole, tiles) for block in range(ends[tile], blocks)]
    total, given, at = sum(blocks - end for end in ends), 0, 0
    for c, mine in enumerate(lists):
        own = [tile for tile in range(c, whole, rest) if ends[tile] < blocks]
        given += sum(blocks - ends[tile] for tile in own)
        stop = len(pieces) if c == rest - 1 else min(len(pieces), max(at, total * (c + 1) // rest - given))
        run, at = pieces[at:stop], stop
        for tile in sorted({tile for tile, _ in run}):
            same = [block for t, block in run if t == tile]
            mine.append(Segment(tile, same[0], same[-1] + 1, owner=False))
        mine += [Segment(tile, ends[tile], blocks, owner=False) for tile in own]
