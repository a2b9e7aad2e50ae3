"""The embedding's sum and the gradients of its tables against float64, bit for bit where float32 is exact."""

import pytest
import torch

from tests.gpu import common
from tests.gpu.kernels import DEVICE, bits, embed, embedding_gradient, need, normal, positions_gradient

pytestmark = pytest.mark.fp8

VOCABULARY = 300
# batch, tokens, columns: fewer places than a chunk has, as many, one more; more than torch sorts in one block (4,096)
SHAPES = [(1, 1, 16), (1, 31, 48), (2, 16, 64), (3, 11, 768), (1, 129, 1600), (5, 96, 272), (3, 1408, 16)]
# lengths of the runs that sorted ids make: chunks have 32 places, four of which are handled together
RUNS = [
    [32, 32, 32], [31, 1, 32, 33, 31, 64], [1] * 40 + [24, 3, 200], [5, 123, 32, 31, 2, 31, 300, 7],
    [97, 1, 1, 1, 60, 4, 28, 3],
]  # fmt: skip


def integers(*shape, seed=0, dtype=torch.bfloat16):
    """Integers from -8 to 8 [shape] on the device: float32 adds a million of them exactly, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(DEVICE, dtype)


def ids_of(kind, batch, tokens, vocabulary, seed=0):
    """int64 [batch, tokens], the first and the last of the vocabulary among them where there is room."""
    generator = torch.Generator().manual_seed(seed)
    count = batch * tokens
    if kind == "equal":
        ids = torch.full((count,), vocabulary - 1)
    elif kind == "different":
        ids = torch.randperm(vocabulary, generator=generator)[:count]
    else:  # a few frequent, many rare, as in text
        ids = (vocabulary ** torch.rand(count, generator=generator, dtype=torch.float64) - 1).long()
        ids[-1], ids[0] = 0, vocabulary - 1
    return ids.view(batch, tokens).to(DEVICE)


def exact_gradient(dx, ids, start):
    """`start` [V, d] with the rows of dx added where ids say, float64."""
    return start.double().index_add(0, ids.view(-1), dx.double().view(-1, dx.shape[-1]))


def assert_exact(dx, ids, vocabulary):
    """The gradient of integers is exact, and rows without an id keep what they hold, even if that is no number."""
    start = integers(vocabulary, dx.shape[-1], seed=1, dtype=torch.float32)
    named = torch.zeros(vocabulary, dtype=torch.bool, device=DEVICE)
    named[ids.view(-1)] = True
    start[~named] = float("nan")
    out = start.clone()
    embedding_gradient(dx, ids, out)
    assert torch.equal(out.double()[named], exact_gradient(dx, ids, start)[named])
    assert torch.equal(bits(out[~named]), bits(start[~named]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("batch", "tokens", "columns"), SHAPES)
def test_embed_is_the_sum_rounded_once(batch, tokens, columns, dtype):
    ids = ids_of("text", batch, tokens, VOCABULARY)
    table = normal(VOCABULARY, columns, dtype=torch.float32)
    positions = normal(tokens + 3, columns, seed=1, dtype=torch.float32)
    got = embed(ids.to(dtype), table, positions)
    assert torch.equal(got, (table[ids] + positions[:tokens]).bfloat16())
    assert torch.equal(embed(ids, table, positions[:tokens].contiguous()), got)
    assert torch.equal(embed(ids.to(dtype), table, None), table[ids].bfloat16())


def test_embed_passes_on_what_is_not_finite():
    ids = ids_of("different", 2, 24, VOCABULARY)
    table = normal(VOCABULARY, 48, dtype=torch.float32)
    positions = normal(24, 48, seed=1, dtype=torch.float32)
    table[ids[0, 5], 3], table[ids[1, 7], 47], positions[9, 0] = float("nan"), float("inf"), float("-inf")
    got, want = embed(ids, table, positions), (table[ids] + positions).bfloat16()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["text", "equal", "different"])
@pytest.mark.parametrize(("batch", "tokens", "columns"), SHAPES)
def test_gradient(batch, tokens, columns, kind):
    vocabulary = VOCABULARY if kind != "different" else max(VOCABULARY, batch * tokens)
    assert_exact(integers(batch, tokens, columns), ids_of(kind, batch, tokens, vocabulary), vocabulary)


@pytest.mark.parametrize("lengths", RUNS)
@pytest.mark.parametrize("columns", [48, 272])
def test_runs_that_begin_and_end_anywhere(lengths, columns):
    """`lengths` are those of the runs once the ids are sorted, whatever the order they come in."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].to(DEVICE)
    assert_exact(integers(1, len(ids), columns), ids.view(1, -1), len(lengths))


@pytest.mark.parametrize("rows", [4096, 4128, 4129, 8223, 8256, 65536])
def test_one_id_in_more_chunks_than_are_looked_at_at_once(rows):
    """128 chunks of 32 are: the run ends with them, one chunk later, one row later; twice as many; very many."""
    assert_exact(integers(1, rows, 16), ids_of("equal", 1, rows, 5), 5)


@pytest.mark.parametrize("vocabulary", [2**15, 2**15 + 64, 50304, 2**16, 2**16 + 64])
def test_ids_of_any_width(vocabulary):
    """Up to 2^16 ids are sorted as signed numbers of 16 bits."""
    ids = ids_of("text", 2, 160, vocabulary)
    low = min(2**15, vocabulary - 8)  # both sides of where a signed number turns negative, and the ends
    ids[0, :16] = torch.arange(low - 8, low + 8)
    ids[1, :8] = torch.arange(vocabulary - 8, vocabulary)
    assert_exact(integers(2, 160, 16), ids, vocabulary)


@pytest.mark.parametrize(("batch", "tokens", "columns"), [(2, 1024, 768), (1, 200, 1600), (3, 1408, 48)])
def test_gradient_of_any_numbers(batch, tokens, columns):
    ids, dx = ids_of("text", batch, tokens, 1000), normal(batch, tokens, columns)
    out = normal(1000, columns, seed=1, dtype=torch.float32)
    want = exact_gradient(dx, ids, out)
    embedding_gradient(dx, ids, out)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=3e-5)


def test_gradients_accumulate():
    out = torch.zeros(VOCABULARY, 48, device=DEVICE)
    want = out.double()
    for seed in range(3):
        ids, dx = ids_of("text", 2, 160, VOCABULARY, seed), integers(2, 160, 48, seed=seed)
        want = exact_gradient(dx, ids, want)
        embedding_gradient(dx, ids, out)
    assert torch.equal(out.double(), want)


@pytest.mark.parametrize("kind", ["text", "equal"])
def test_repeats(kind):
    """Also where memory that nobody has written yet holds something else."""
    ids, dx = ids_of(kind, 3, 1408, 1000), normal(3, 1408, 80)
    tables = [normal(rows, 80, seed=1, dtype=torch.float32) for rows in (1000, 1408)]
    first, second = ([table.clone() for table in tables] for _ in range(2))
    embedding_gradient(dx, ids, first[0])
    positions_gradient(dx, first[1], add=True)
    with common.determinism():  # fills such memory with NaN
        embedding_gradient(dx, ids, second[0])
        positions_gradient(dx, second[1], add=True)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("lengths", RUNS)
def test_what_is_not_finite_reaches_its_own_id_alone(lengths, bad):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(DEVICE).view(1, -1)
    for place in (0, 31, 32, ids.shape[1] - 1):
        dx = integers(1, ids.shape[1], 48)
        out, positions = torch.zeros(len(lengths), 48, device=DEVICE), torch.zeros(ids.shape[1], 48, device=DEVICE)
        dx[0, place, 17] = bad
        want = exact_gradient(dx, ids, out)
        embedding_gradient(dx, ids, out)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=0, equal_nan=True)
        assert (~out.isfinite()).sum() == 1
        positions_gradient(dx, positions, add=True)
        torch.testing.assert_close(positions, dx[0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("beyond", [0, 1, 37])
@pytest.mark.parametrize(("batch", "tokens", "columns"), [*SHAPES, (64, 20, 144)])
def test_positions(batch, tokens, columns, beyond, add):
    dx = integers(batch, tokens, columns)
    out = integers(tokens + beyond, columns, seed=1, dtype=torch.float32)
    want = out.double() if add else torch.zeros_like(out, dtype=torch.float64)
    want[:tokens] += dx.double().sum(0)
    if not add:
        out.fill_(float("nan"))  # must not be read
    positions_gradient(dx, out, add)
    assert torch.equal(out.double(), want)


def test_positions_of_any_numbers():
    dx = normal(64, 33, 768)
    out = torch.empty(40, 768, device=DEVICE)
    positions_gradient(dx, out, add=False)
    torch.testing.assert_close(out[:33].double(), dx.double().sum(0), rtol=1e-6, atol=3e-5)


def test_more_elements_than_int32_counts():
    need(16)
    batch, tokens, columns = 32, 16400, 4096
    assert batch * tokens * columns > 2**31
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=DEVICE)
    ids[-1, -3:] = 1
    dx = torch.zeros(batch, tokens, columns, dtype=torch.bfloat16, device=DEVICE)
    dx[-1, -3:], dx[0, 0] = 2.0, 4.0
    out, positions = torch.zeros(2, columns, device=DEVICE), torch.zeros(tokens, columns, device=DEVICE)
    embedding_gradient(dx, ids, out)
    positions_gradient(dx, positions, add=True)
    assert torch.all(out == torch.tensor([[4.0], [6.0]], device=DEVICE))
    assert torch.all(positions[-3:] == 2.0)
    assert torch.all(positions[0] == 4.0)
    assert torch.count_nonzero(positions) == 4 * columns
    del dx
    x = embed(ids, out, positions)
    assert torch.all(x[-1, -3:] == 8.0)
    assert torch.all(x[-1, -4] == 4.0)
    assert torch.all(x[0, 0] == 8.0)
