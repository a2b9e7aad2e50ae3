"""How a weight gradient is dealt out to clusters: every block once, nobody waits for ever, and few wait at all.

And that the kernel's constants are those of its caller. Its numbers are tested on a GPU.
"""

import re

import pytest
import torch

from gpt2_fp8.kernels import nvrtc, weight_gradient
from gpt2_fp8.kernels.weight_gradient import ADD, LEAVE, WRITE, plan_segments, tabulate

# tiles, blocks, clusters: of GPT-2 124M's and 355M's layers on 132 multiprocessors, and others
SHAPES = [(36, 512, 66), (64, 256, 66), (9, 512, 66), (16, 512, 66), (30, 33, 66), (2, 4, 66), (1, 1, 66), (36, 1, 57)]
MORE_TILES = [(128, 256, 66), (64, 256, 57), (3, 5, 2), (4, 1, 3), (7, 8, 1)]


@pytest.mark.parametrize("shape", SHAPES + MORE_TILES)
def test_every_block_is_multiplied_once_and_owners_wait_only_for_clusters_before_them(shape):
    """Clusters begin in their order: what is waited for has begun, and by induction ends."""
    tiles, blocks, clusters = shape
    lists = plan_segments(*shape)
    assert len(lists) == clusters
    found = sorted((s.tile, block) for mine in lists for s in mine for block in range(s.first, s.last))
    assert found == [(tile, block) for tile in range(tiles) for block in range(blocks)]
    assert all(s.last > s.first for mine in lists for s in mine)
    owners = [(s.tile, cluster) for cluster, mine in enumerate(lists) for s in mine if s.owner]
    assert sorted(tile for tile, _ in owners) == list(range(tiles))
    owner = dict(owners)
    assert all(c < owner[s.tile] for c, mine in enumerate(lists) for s in mine if not s.owner)
    # in its own list, an owner leaves its sums for others before it waits
    assert all(not s.owner or all(later.owner for later in mine[i:]) for mine in lists for i, s in enumerate(mine))
    if shape not in MORE_TILES:
        loads = [sum(s.last - s.first for s in mine) for mine in lists]
        costs = LEAVE + ADD + WRITE  # an owner that adds little multiplies more
        assert max(loads) <= min(blocks, 1.1 * tiles * blocks / clusters + costs), "nobody has much more than its share"


@pytest.mark.parametrize("shape", SHAPES + MORE_TILES)
def test_the_table(shape):
    lists = plan_segments(*shape)
    rows, starts, slots = tabulate(lists)
    flat = [s for mine in lists for s in mine]
    assert [tuple(row[:3]) for row in rows] == [s[:3] for s in flat]
    assert starts == [sum(map(len, lists[:c])) for c in range(len(lists) + 1)]
    assert sorted(row[3] for row in rows if row[3] >= 0) == list(range(slots))
    for row, segment in zip(rows, flat, strict=True):
        assert (row[3] == -1) == segment.owner
        mine = sorted((other for other in rows if other[0] == row[0] and other[3] >= 0), key=lambda other: other[1])
        assert row[5] == len(mine)
        assert [other[3] for other in mine] == list(range(row[4], row[4] + len(mine))), "the order of the blocks"


def test_the_work_of_a_shape(monkeypatch):
    """Tiles at the edges have their columns in the right place, and a table's row names them."""
    monkeypatch.setattr(nvrtc, "processors", lambda device: 132)
    work = weight_gradient._work.__wrapped__(640, 384, 4160, torch.device("cpu"))
    rows = work.rows.tolist()
    assert (work.tiles, work.blocks) == (3 * 2, 132)
    assert {(row, column) for row, column, *_ in rows} == {(r, c) for r in (0, 256, 512) for c in (0, 256)}
    assert {tuple(row[:2]): row[7] for row in rows}[256, 256] == 3
    assert max(row[3] for row in rows) == 33, "the last block of 128 rows has only 64"


def test_constants_are_the_kernels():
    text = nvrtc._source("weight_gradient.cu")
    given = {name: int(value) for name, value in re.findall(r"\b([A-Z]+) = (\d+)[,;]", text)}
    assert given["CONSUMERS"] + 128 == weight_gradient.THREADS
    assert weight_gradient.SHARED_BYTES <= 227 * 1024
    fields = re.search(r"struct Segment \{(.*?)\n\};", text, re.DOTALL)[1]
    names = re.findall(r"\w+", re.sub(r"//.*|int", "", fields))
    assert names == ["row", "column", "first", "last", "slot", "from", "count", "tile"], "as `_work` makes them"
