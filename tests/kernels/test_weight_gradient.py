"""What the weight gradient's kernel assumes of itself, on the CPU: its constants, its shared memory, and the way of a
number from the operand that is not transposed to the tensor cores' registers, and of a sum to its place."""

import re

import pytest
import torch

from gpt2_fp8.kernels import nvrtc, weight_gradient

BLOCK, ROWS, COLUMNS, CLUSTER = 128, 128, 256, 2
PART = 64


@pytest.fixture(scope="module")
def text():
    return nvrtc._source("weight_gradient.cu")


def test_constants_are_the_kernels(text):
    given = {name: int(value) for name, value in re.findall(r"\b([A-Z]+) = (\d+)[,;]", text)}
    for name in ("BLOCK", "ROWS", "COLUMNS", "CLUSTER", "STAGES"):
        assert getattr(weight_gradient, name) == given[name]
    assert given["CONSUMERS"] + 128 == weight_gradient.THREADS
    assert given["PART"] == PART
    members = re.search(r"struct Memory \{(.*?)\n\};", text, re.DOTALL)[1]
    assert re.findall(r"u8 \w+\[STAGES\]\[(\w+)\]|u64 (.*);", members) == [
        ("A_BYTES", ""), ("B_BYTES", ""), ("", "full[STAGES], empty[STAGES]")
    ]  # fmt: skip
    assert "A_BYTES = BLOCK * ROWS, B_BYTES = COLUMNS * BLOCK" in text
    assert weight_gradient.SHARED_BYTES == given["STAGES"] * (BLOCK * ROWS + COLUMNS * BLOCK + 16) <= 227 * 1024
    fields = re.search(r"struct Segment \{(.*?)\n\};", text, re.DOTALL)[1]
    names = re.findall(r"\w+", re.sub(r"//.*|int", "", fields))
    assert names == ["row", "column", "first", "last", "slot", "from", "count", "tile"], "as `_work` makes them"


def test_the_work_of_a_shape(monkeypatch):
    """Tiles at the edges have their columns in the right place, and a table's row names them."""
    monkeypatch.setattr(nvrtc, "processors", lambda device: 132)
    work = weight_gradient._work.__wrapped__(640, 384, 4160, torch.device("cpu"))
    assert (work.tiles, work.blocks) == (3 * 2, 132)
    assert {(row, column) for row, column, *_ in work.rows.tolist()} == {
        (r, c) for r in (0, 256, 512) for c in (0, 256)
    }
    assert {tuple(row[:2]): row[7] for row in work.rows.tolist()}[256, 256] == 3
    assert max(row[3] for row in work.rows.tolist()) == 33, "the last block of 128 rows has only 64"


def expression(text, pattern):
    return re.search(pattern, text)[1].replace("/", "//")


def read_by(lane, warp, text):
    """The place of a lane's address in 32 rows of a, and its byte selectors, by the kernel's own expressions."""
    names = {"lane": lane, "warp": warp, "ROWS": ROWS}
    for name in ("matrix", "pair", "second"):
        names[name] = eval(expression(text, rf"\b{name} = (\(?[^,;]*?)[,;]"), names)
    names["row"] = eval(expression(text, r"const int row = (matrix [^;]+);"), names)
    even = 0x6420 if lane % 4 < 2 else 0x2064
    assert "even = lane % 4 < 2 ? 0x6420 : 0x2064;" in text
    return eval(expression(text, r"offset = ([^;]+);"), names), even


def permuted(x, y, selector):
    """__byte_perm."""
    joined = [(word >> 8 * i) & 255 for word in (x, y) for i in range(4)]
    return [joined[(selector >> 4 * i) & 7] for i in range(4)]


def test_a_comes_to_the_tensor_cores_transposed(text):
    """A warp's 32 rows of 16 columns as the copy engine leaves them, `ldmatrix.x4.trans`, the byte permutations, and
    the fragment of the PTX ISA. No bank is read twice at a time."""
    rows = torch.randint(0, 256, (32, ROWS), generator=torch.Generator().manual_seed(0))
    memory = [0] * (32 * ROWS)
    for row in range(32):
        for byte in range(ROWS):
            memory[row * ROWS + ((byte // 16) ^ (row % 8)) * 16 + byte % 16] = int(rows[row, byte])
    assert "const u32 odd = even + 0x1111;" in text
    for warp in range(8):
        lanes = [read_by(lane, warp, text) for lane in range(32)]
        words = [[0] * 4 for _ in range(32)]
        for matrix in range(4):
            addresses = [lanes[matrix * 8 + i][0] for i in range(8)]
            assert len({address // 16 % 8 for address in addresses}) == 8, "a bank conflict"
            for lane in range(32):
                column, two = lane // 4, lane % 4 * 2  # transposed: one column of two neighbouring rows
                pairs = [memory[at + 2 * column] | memory[at + 2 * column + 1] << 8 for at in addresses[two : two + 2]]
                words[lane][matrix] = pairs[0] | pairs[1] << 16
        fragment = torch.zeros(16, 32, dtype=torch.int64)
        for lane, (w, x, y, z) in enumerate(words):
            even, g, q = lanes[lane][1], lane // 4, lane % 4
            registers = [permuted(*pair, s) for pair in ((w, x), (y, z)) for s in (even, even + 0x1111)]
            for i, register in enumerate(registers):
                fragment[g + 8 * (i % 2), 16 * (i // 2) + 4 * q :][:4] = torch.tensor(register)
        # row g is column 2 g of the warp's 16, and row g + 8 is column 2 g + 1
        columns = rows[:, warp * 16 : warp * 16 + 16].t()
        assert torch.equal(fragment, torch.cat((columns[::2], columns[1::2])))


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_go_to_their_places(text, transposed):
    """Every number of a tile is written once, where its column of a and its column of b are."""
    thread, part, number = torch.meshgrid(
        torch.arange(256), torch.arange(COLUMNS // PART), torch.arange(PART // 2), indexing="ij"
    )
    warp, g, q = thread // 32, thread % 32 // 4, thread % 4
    i, s, e = number // 4, number // 2 % 2, number % 2  # the PTX ISA: row g + 8 s, column 8 i + 2 q + e
    sums = (warp * 16 + 2 * g + s) * COLUMNS + part * PART + 8 * i + 2 * q + e
    out = torch.full((ROWS * COLUMNS,), -1)
    first_row, first_column = warp * 16 + g * 2, q * 2
    assert "row = first_row + warp * 16 + lane / 4 * 2, column = first_column + lane % 4 * 2;" in text
    c = eval(
        expression(text, r"const int c = ([^,]+),"), {"column": first_column, "part": part, "PART": PART, "i": 2 * i}
    )
    for j in range(2):
        at = (c + j) * ROWS + first_row if transposed else (first_row + j) * COLUMNS + c
        for k in range(2):  # of float2
            where = (e == j) & (s == k) if transposed else (s == j) & (e == k)
            out[at[where] + k] = sums[where]
    expected = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    assert torch.equal(out, (expected.t() if transposed else expected).reshape(-1))
