"""What the products with GELU in their epilogue assume of themselves, on the CPU: how much shared memory they need, how
tiles are dealt out, and that the order in which rows and columns lie there is undone by who writes what."""

import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gpt2_fp8.kernels import nvrtc, shapes

BLOCK_BYTES = 227 * 1024  # of shared memory, at most
ROWS, COLUMNS, LINE = 64, 128, 128  # a tile, and bytes of its rows that are copied together


@pytest.fixture(scope="module")
def product():
    """The module, also where Triton is missing: its Python needs only that Triton's decorators can be named."""
    before, missing = set(sys.modules), importlib.util.find_spec("triton") is None
    with pytest.MonkeyPatch.context() as patch:
        if missing:
            triton, language = ModuleType("triton"), ModuleType("triton.language")
            triton.jit, triton.language, language.constexpr = lambda function: function, language, lambda value: value
            patch.setitem(sys.modules, "triton", triton)
            patch.setitem(sys.modules, "triton.language", language)
        yield importlib.import_module("gpt2_fp8.kernels.product_gelu")
        if missing:  # what stands on a stand-in is nobody else's
            for name in set(sys.modules) - before:
                package, _, module = name.rpartition(".")
                if package == "gpt2_fp8.kernels" or name == "gpt2_fp8.layers.fp8_linear":
                    del sys.modules[name]
                    vars(sys.modules[package]).pop(module, None)


@pytest.fixture(params=["product_gelu", "product_gelu_backward"])
def kernel(request, product):
    """Its constants for an inner dimension, and its text."""
    text = nvrtc._source(f"{request.param}.cu")
    turned = eval(re.search(r"constexpr int TURNED_BYTES = ([\d* ]+);", text)[1])
    shape_of = shapes.forward if request.param == "product_gelu" else shapes.backward
    return SimpleNamespace(shape_of=shape_of, text=text, turned=turned)


def memory_bytes(k, warpgroups, stages, turned):
    """sizeof(Memory): each member begins at a multiple of its alignment."""
    members = [
        (1, k // LINE * COLUMNS * LINE),  # slab
        (1, warpgroups * stages * ROWS * LINE),  # ring
        (1, warpgroups * turned),
        (8, warpgroups * stages * 8),  # full
        (8, warpgroups * stages * 8),  # empty
    ]
    end = 0
    for alignment, size in members:
        end = -(-end // alignment) * alignment + size
    return -(-end // 8) * 8


def test_the_members_are_those(kernel):
    """What `memory_bytes` adds up is what the struct holds."""
    body = re.search(r"struct Memory \{(.*?)\n\};", kernel.text, re.DOTALL)[1]
    members = re.findall(r"(u8|u64) (.*?);", re.sub(r"//.*", "", body))
    assert members == [
        ("u8", "slab[LINES][SLAB]"),
        ("u8", "ring[WARPGROUPS][STAGES][CHUNK]"),
        ("u8", "turned[WARPGROUPS][TURNED_BYTES]"),
        ("u64", "full[WARPGROUPS][STAGES], empty[WARPGROUPS][STAGES]"),
    ]
    assert "CHUNK = ROWS * LINE, SLAB = COLUMNS * LINE" in kernel.text


@pytest.mark.parametrize("k", range(128, 2049, 128))
def test_shared_memory(kernel, product, k, monkeypatch):
    shape = kernel.shape_of(k)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    operands = (torch.empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (64, 128))
    assert product.fits(*operands) is (k <= 1024)
    if shape.stages < 1:
        return
    needed = memory_bytes(k, shape.warpgroups, shape.stages, kernel.turned)
    assert shape.shared_bytes == needed <= BLOCK_BYTES
    more = memory_bytes(k, shape.warpgroups, shape.stages + 1, kernel.turned)
    assert shape.stages == shapes.MOST_STAGES or more > BLOCK_BYTES


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((64, 128, 128), True), ((192, 384, 1024), True)]
    + [((128, 128, k), False) for k in (64, 192, 1280, 1600, 2048)]
    + [((m, 128, 128), False) for m in (16, 96)]
    + [((128, n, 128), False) for n in (64, 192)],
)
def test_what_fits(product, shape, expected, monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    m, n, k = shape
    a, b = (torch.empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, n))
    assert product.fits(a, b) is expected
    capability = (10, 0)
    assert not product.fits(a, b)


def test_parts_are_counted_right(product):
    """Against a count of the blocks that have a tile of each slab."""
    for grid in (1, 2, 3, 7, 16, 131, 132):
        for down in (1, 2, 3, 7, 64, 65):
            for slabs in (1, 2, 3, 24, 133):
                tiles = down * slabs
                if grid > tiles:
                    continue
                blocks = [set() for _ in range(slabs)]
                for block in range(grid):
                    for tile in range(block * tiles // grid, (block + 1) * tiles // grid):
                        blocks[tile // down].add(block)
                assert product._parts(grid, down, slabs) == max(map(len, blocks)), (grid, down, slabs)


def in_shared_memory(rows):
    """Rows of LINE bytes as the copy engine and the tensor cores have them: pieces of 16 bytes change places."""
    pieces = rows.view(-1, 8, 16)
    row, part = torch.meshgrid(torch.arange(len(rows)), torch.arange(8), indexing="ij")
    out = torch.empty_like(pieces)
    out[row, part ^ row % 8] = pieces
    return out.view(-1)


def read_by_tensor_cores(memory):
    rows = memory.view(-1, 8, 16)
    row, part = torch.meshgrid(torch.arange(len(rows)), torch.arange(8), indexing="ij")
    return rows[row, part ^ row % 8].view(-1, LINE)


def fetched(product, a, tile, line, monkeypatch):
    """A box of the map that `tensor_map` makes of a, at `fetch_tile`'s coordinates, as it comes to shared memory."""
    seen = {}

    def view(rows, stream_ptr):
        return SimpleNamespace(as_tensor_map=lambda box, swizzle: seen.update(rows=rows, box=box, swizzle=swizzle))

    options = type("Options", (), {"__init__": lambda self, box: None, "swizzle": SwizzleType()})
    core, utils = ModuleType("cuda.core"), ModuleType("cuda.core.utils")
    core.TensorMapDescriptorOptions, utils.StridedMemoryView = options, SimpleNamespace(from_dlpack=view)
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.core", core), ("cuda.core.utils", utils)):
        monkeypatch.setitem(sys.modules, name, module)
    product.tensor_map(a)
    assert seen["swizzle"] == "128 bytes"
    outer, twice, eight, bytes_of_row = seen["box"]
    box = seen["rows"][tile * (ROWS // 16) :][:outer, :twice, :eight, line * LINE :][..., :bytes_of_row]
    return in_shared_memory(box.reshape(-1, LINE))


class SwizzleType:
    SWIZZLE_128B = "128 bytes"


def slab_in_shared_memory(b, slab, line, text):
    """What `load_slab` leaves there, with the expression that the file has for a row's column."""
    expression = re.search(r"const int column = (row / 32 [^;]+);", text)[1].replace("/", "//")
    out = torch.zeros(COLUMNS * LINE, dtype=b.dtype)
    for row in range(COLUMNS):
        column = eval(expression, {"row": row})
        for part in range(8):
            to = row * LINE + (part ^ row % 8) * 16
            from_ = line * LINE + part * 16
            out[to : to + 16] = b[slab * COLUMNS + column, from_ : from_ + 16]
    return out


def test_rows_and_columns_come_out_in_order(product, kernel, monkeypatch):
    """A tile from the map and the slab to the numbers that threads write: it is a b^T."""
    k, tile, slab = 256, 1, 2
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 16, (192, k), generator=generator, dtype=torch.uint8)
    b = torch.randint(0, 16, (384, k), generator=generator, dtype=torch.uint8)
    product_of_tile = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
    for line in range(k // LINE):
        of_a = read_by_tensor_cores(fetched(product, a, tile, line, monkeypatch)).long()
        of_b = read_by_tensor_cores(slab_in_shared_memory(b, slab, line, kernel.text)).long()
        product_of_tile += of_a @ of_b.t()
    thread, number = torch.meshgrid(torch.arange(128), torch.arange(64), indexing="ij")
    warp, g, q = thread // 32, thread % 32 // 4, thread % 4
    # PTX: number 4 i + 2 s + e of a thread
    i, s, e = number // 4, number // 2 % 2, number % 2
    sums = product_of_tile[16 * warp + 8 * s + g, 8 * i + 2 * q + e]
    # the epilogues: sums + (piece * 4 + k) * 4 + s * 2 + e goes to a row and a column of the tile
    piece, pair = number // 16, number // 4 % 4
    out = torch.full((ROWS, COLUMNS), -1)
    out[warp * 16 + g * 2 + s, q * 8 + piece * 32 + pair * 2 + e] = sums
    expected = a[tile * ROWS :][:ROWS].long() @ b[slab * COLUMNS :][:COLUMNS].long().t()
    assert torch.equal(out, expected)


def test_columns_are_turned(kernel):
    """The backward's way to [N, M]: `stmatrix.trans` of words of two rows by two columns, then runs of 16 rows."""
    if kernel.turned == 16:
        pytest.skip("nothing is transposed")
    place = re.search(r"return (lane % 8 [^;]+);", kernel.text)[1].replace("/", "//")
    wait = re.search(r"return (column \* ROWS [^;]+);", kernel.text)[1].replace("/", "//")

    def waiting(column, warp):
        return eval(wait, {"column": column, "warp": warp, "ROWS": ROWS})

    tile = torch.randint(0, 256, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    memory = torch.full((kernel.turned,), -1)
    for warp in range(4):
        for piece in range(COLUMNS // 32):
            for matrix in range(4):
                for lane in range(32):
                    # word `matrix` of lane 4 g + q: in each half a column, in it rows 2 g and 2 g + 1; a transposed
                    # store puts half h of lane 4 g + q to place g of the row that lane 8 matrix + 2 q + h names
                    g, q = lane // 4, lane % 4
                    for half in range(2):
                        column = eval(place, {"lane": 8 * matrix + 2 * q + half})
                        to = waiting(column, warp) + piece * 32 * ROWS + 2 * g
                        rows = slice(warp * 16 + 2 * g, warp * 16 + 2 * g + 2)
                        memory[to : to + 2] = tile[rows, piece * 32 + q * 8 + matrix * 2 + half]
    out = torch.full((COLUMNS, ROWS), -1)
    for thread in range(128):
        column, part = thread // 4, thread % 4
        for piece in range(COLUMNS // 32):
            at = waiting(column, part) + piece * 32 * ROWS
            out[column + piece * 32, part * 16 : part * 16 + 16] = memory[at : at + 16]
    assert torch.equal(out, tile.t())


# Who uses them: the product of a layer


@pytest.fixture
def layer(product, monkeypatch):
    """Makes a product of a weight [256, 128] whose products are only noted, under its settings; and the notes."""
    module = importlib.import_module("gpt2_fp8.layers.fp8_linear")
    from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales

    notes = []

    def noted(name, result):
        monkeypatch.setattr(module, name, lambda *given, **more: notes.append((name, more)) or result(*given))

    noted("matmul", lambda a, b, out, *_: out)
    noted("gelu_cast", lambda h, slot: "cast")
    noted("gelu_backward_cast", lambda *given: "gradient")
    noted("product_gelu", lambda operands, bias, slot: ("h", "cast"))
    noted("product_gelu_backward", lambda *given: "gradient")

    def make(fits, fast=False):
        monkeypatch.setattr(module, "fits", lambda a, b: fits)
        scales = Scales(DelayedScaling(16, 0, False, torch.float8_e4m3fn, torch.float8_e5m2, fast))
        made = module.FP8Linear(scales)
        scales.allocate(torch.device("cpu"))
        made.w8, made.w8t = torch.zeros(256, 128), torch.zeros(128, 256)
        return made, made.slot("input"), notes

    return make


@pytest.mark.parametrize("fast", [False, True])
def test_sums_are_promoted_where_the_settings_say_so(layer, fast):
    product, _, notes = layer(fits=False, fast=fast)
    product.forward(torch.zeros(64, 128))
    product.input_gradient(torch.zeros(64, 256))
    product.add_weight_gradient(torch.nn.Parameter(torch.zeros(256, 128)), torch.zeros(256, 64), torch.zeros(128, 64))
    forward, gradient, weight = (more for _, more in notes)
    assert forward["fast_accumulate"] is True
    assert gradient["fast_accumulate"] is fast
    assert not weight.get("fast_accumulate", False)


def test_gelu_is_in_the_product_where_that_fits(layer):
    product, slot, notes = layer(fits=True)
    assert product.forward_gelu(torch.zeros(64, 128), slot) == ("h", "cast")
    assert product.forward_gelu(torch.zeros(64, 128), slot, only_h=True)[0] == "h"
    assert product.input_gradient_gelu(torch.zeros(64, 256), torch.zeros(64, 128), slot) == "gradient"
    assert [name for name, _ in notes] == ["product_gelu", "product_gelu", "product_gelu_backward"]


def test_elsewhere_a_product_and_a_kernel_do_it(layer):
    product, slot, notes = layer(fits=False)
    assert product.forward_gelu(torch.zeros(64, 128), slot)[1] == "cast"
    assert product.forward_gelu(torch.zeros(64, 128), slot, only_h=True)[1] is None
    assert product.input_gradient_gelu(torch.zeros(64, 256), torch.zeros(64, 128), slot) == "gradient"
    assert [name for name, _ in notes] == ["matmul", "gelu_cast", "matmul", "matmul", "gelu_backward_cast"]
