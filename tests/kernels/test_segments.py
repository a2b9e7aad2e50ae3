"""How a weight gradient is dealt out to clusters: every block once, nobody waits for ever, and few wait at all."""

import pytest

from gpt2_fp8.kernels import segments

# tiles, blocks, clusters: of GPT-2 124M's and 355M's layers on 132 multiprocessors, and others
SHAPES = [(36, 512, 66), (64, 256, 66), (9, 512, 66), (16, 512, 66), (30, 33, 66), (2, 4, 66), (1, 1, 66), (36, 1, 57)]
MORE_TILES = [(128, 256, 66), (64, 256, 57), (3, 5, 2), (4, 1, 3), (7, 8, 1)]
SHAPES += MORE_TILES


@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_is_multiplied_once(shape):
    tiles, blocks, clusters = shape
    lists = segments.plan(*shape)
    assert len(lists) == clusters
    found = sorted((s.tile, block) for mine in lists for s in mine for block in range(s.first, s.last))
    assert found == [(tile, block) for tile in range(tiles) for block in range(blocks)]
    assert all(s.last > s.first for mine in lists for s in mine)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tile_has_one_owner_which_waits_only_for_clusters_before_it(shape):
    """Clusters begin in their order: what is waited for has begun, and by induction ends."""
    lists = segments.plan(*shape)
    owners = [(s.tile, cluster) for cluster, mine in enumerate(lists) for s in mine if s.owner]
    assert sorted(tile for tile, _ in owners) == list(range(shape[0]))
    owner = dict(owners)
    assert all(c < owner[s.tile] for c, mine in enumerate(lists) for s in mine if not s.owner)
    # in its own list, an owner leaves its sums for others before it waits
    assert all(not s.owner or all(later.owner for later in mine[i:]) for mine in lists for i, s in enumerate(mine))


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - set(MORE_TILES)))
def test_nobody_has_much_more_than_a_fair_share(shape):
    tiles, blocks, clusters = shape
    loads = [sum(s.last - s.first for s in mine) for mine in segments.plan(*shape)]
    costs = segments.LEAVE + segments.ADD + segments.WRITE  # an owner that adds little multiplies more
    assert max(loads) <= min(blocks, 1.1 * tiles * blocks / clusters + costs)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_table(shape):
    lists = segments.plan(*shape)
    rows, starts, slots = segments.table(lists)
    flat = [s for mine in lists for s in mine]
    assert [tuple(row[:3]) for row in rows] == [s[:3] for s in flat]
    assert starts == [sum(map(len, lists[:c])) for c in range(len(lists) + 1)]
    assert sorted(row[3] for row in rows if row[3] >= 0) == list(range(slots))
    for row, segment in zip(rows, flat, strict=True):
        assert (row[3] == -1) == segment.owner
        mine = sorted((other for other in rows if other[0] == row[0] and other[3] >= 0), key=lambda other: other[1])
        assert row[5] == len(mine)
        assert [other[3] for other in mine] == list(range(row[4], row[4] + len(mine))), "the order of the blocks"
