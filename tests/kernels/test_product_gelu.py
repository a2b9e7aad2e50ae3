"""What the products with GELU in their epilogue assume of themselves, on the CPU: how much shared memory they need, how
tiles are dealt out, and that the order in which rows and columns lie there is undone by who writes what."""

import importlib.util
import itertools
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
                if package == "gpt2_fp8.kernels" or name.startswith("gpt2_fp8.layers.fp8_"):
                    del sys.modules[name]
                    vars(sys.modules[package]).pop(module, None)


@pytest.fixture(params=["product_gelu", "product_gelu_backward", "product_logits", "product_probabilities"])
def kernel(request, product):
    """Its text, and how many neighbouring columns a thread has."""
    text = nvrtc._source(f"{request.param}.cu")
    return SimpleNamespace(text=text, piece=int(re.search(r"constexpr int PIECE = (\d+);", text)[1]))


def memory_bytes(k, stages, staged=0):
    """sizeof(Memory), or of StagedMemory: each member begins at a multiple of its alignment."""
    members = [
        (1, shapes.WARPGROUPS * staged),
        (1, k // LINE * COLUMNS * LINE),  # slab
        (1, shapes.WARPGROUPS * stages * ROWS * LINE),  # ring
        (8, shapes.WARPGROUPS * stages * 8),  # full
        (8, shapes.WARPGROUPS * stages * 8),  # empty
    ]
    end = 0
    for alignment, size in members:
        end = -(-end // alignment) * alignment + size
    return -(-end // 8) * 8


def test_the_members_are_those(kernel):
    """What `memory_bytes` adds up is what the struct holds."""
    if "StagedMemory" in kernel.text:
        assert "struct StagedMemory {\n  u8 staged[WARPGROUPS][STAGED];" in kernel.text
        assert "STAGED = ROWS * COLUMNS;" in kernel.text
    body = re.search(r"struct Memory \{(.*?)\n\};", kernel.text, re.DOTALL)[1]
    members = re.findall(r"(u8|u64) (.*?);", re.sub(r"//.*", "", body))
    assert members == [
        ("u8", "slab[LINES][SLAB]"),
        ("u8", "ring[WARPGROUPS][STAGES][CHUNK]"),
        ("u64", "full[WARPGROUPS][STAGES], empty[WARPGROUPS][STAGES]"),
    ]
    assert "CHUNK = ROWS * LINE, SLAB = COLUMNS * LINE" in kernel.text
    assert f"WARPGROUPS = {shapes.WARPGROUPS}," in kernel.text


@pytest.mark.parametrize("staged", [0, shapes.STAGED])
@pytest.mark.parametrize("k", range(128, 2049, 128))
def test_shared_memory(product, k, staged, monkeypatch):
    shape = shapes.product(k, staged)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    operands = (torch.empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (64, 128))
    assert product.fits(*operands, staged) is (k <= 1024)
    if shape.stages < 1:
        return
    assert shape.shared_bytes == memory_bytes(k, shape.stages, staged) <= BLOCK_BYTES
    more = memory_bytes(k, shape.stages + 1, staged)
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


def described(call, monkeypatch):
    """What a call describes to the copy engine: the tensor, the box, and how it is swizzled."""
    seen = {}

    def view(tensor, stream_ptr):
        made = lambda box, swizzle: seen.update(tensor=tensor, box=box, swizzle=swizzle)  # noqa: E731
        return SimpleNamespace(as_tensor_map=made)

    options = type("Options", (), {"__init__": lambda self, box: None, "swizzle": SwizzleType()})
    core, utils = ModuleType("cuda.core"), ModuleType("cuda.core.utils")
    core.TensorMapDescriptorOptions, utils.StridedMemoryView = options, SimpleNamespace(from_dlpack=view)
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.core", core), ("cuda.core.utils", utils)):
        monkeypatch.setitem(sys.modules, name, module)
    call()
    return SimpleNamespace(**seen)


def fetched(product, a, tile, line, monkeypatch):
    """A box of the map that `tensor_map` makes of a, at `fetch_tile`'s coordinates, as it comes to shared memory."""
    seen = described(lambda: product.tensor_map(a), monkeypatch)
    assert seen.swizzle == "128 bytes"
    outer, twice, eight, bytes_of_row = seen.box
    box = seen.tensor[tile * (ROWS // 16) :][:outer, :twice, :eight, line * LINE :][..., :bytes_of_row]
    return in_shared_memory(box.reshape(-1, LINE))


class SwizzleType:
    SWIZZLE_64B, SWIZZLE_128B = "64 bytes", "128 bytes"


def slab_in_shared_memory(b, slab, line, kernel):
    """What `load_slab` leaves there, with the expression that the file has for a row's column."""
    expression = re.search(r"const int column = (row / SPAN [^;]+);", kernel.text)[1].replace("/", "//")
    constants = {"PIECE": kernel.piece, "SPAN": 4 * kernel.piece}
    out = torch.zeros(COLUMNS * LINE, dtype=b.dtype)
    for row in range(COLUMNS):
        column = eval(expression, {"row": row, **constants})
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
        of_b = read_by_tensor_cores(slab_in_shared_memory(b, slab, line, kernel)).long()
        product_of_tile += of_a @ of_b.t()
    thread, number = torch.meshgrid(torch.arange(128), torch.arange(64), indexing="ij")
    warp, g, q = thread // 32, thread % 32 // 4, thread % 4
    # PTX: number 4 i + 2 s + e of a thread
    i, s, e = number // 4, number // 2 % 2, number % 2
    sums = product_of_tile[16 * warp + 8 * s + g, 8 * i + 2 * q + e]
    # the epilogues: sums + (piece * PIECE / 2 + pair) * 4 + s * 2 + e goes to a row and a column of the tile
    piece, pair = i // (kernel.piece // 2), i % (kernel.piece // 2)
    out = torch.full((ROWS, COLUMNS), -1)
    out[warp * 16 + g * 2 + s, q * kernel.piece + piece * 4 * kernel.piece + pair * 2 + e] = sums
    expected = a[tile * ROWS :][:ROWS].long() @ b[slab * COLUMNS :][:COLUMNS].long().t()
    assert torch.equal(out, expected)


def test_a_staged_tile_comes_out_transposed(product, monkeypatch):
    """The words that threads store by stmatrix, through shared memory, to the box that the copy engine writes."""
    module = importlib.import_module("gpt2_fp8.kernels.product_probabilities")
    tile = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    staged = torch.full((ROWS * COLUMNS,), -1)
    for warp, lane in itertools.product(range(4), range(32)):
        g, q = lane // 4, lane % 4
        rows = tile[warp * 16 + g * 2 :][:2]  # a thread's two, and 16 columns of each 64
        for piece, half in itertools.product(range(2), range(2)):
            for matrix in range(4):  # a word: two columns of two rows
                pair = rows[:, piece * 64 + q * 16 + half * 8 + matrix * 2 :][:, :2]
                for e in range(
                    2
                ):  # turned: element (g, 2 q + e) becomes element (2 q + e, g), of the line 8 matrix + 2 q + e
                    line = 8 * matrix + 2 * q + e
                    at = line * ROWS + (warp ^ line // 2 % 4) * 16 + (piece * 64 + half * 32) * ROWS
                    staged[at + g * 2 : at + g * 2 + 2] = pair[:, e]
    assert staged.min() >= 0
    # SWIZZLE_64B: bits 4 and 5 of an address with bits 7 and 8
    address = torch.arange(len(staged))
    plain = staged[address ^ (address >> 7 & 3) << 4]
    qt = torch.full((2 * COLUMNS, 3 * ROWS), 0, dtype=torch.uint8)
    seen = described(lambda: module._turned(qt), monkeypatch)
    assert (seen.swizzle, seen.box) == ("64 bytes", (2, 8, 4, 2, ROWS))
    assert seen.tensor.data_ptr() == qt.data_ptr()
    out = torch.full((2 * COLUMNS, 3 * ROWS), -1)
    here = out.as_strided(seen.tensor.shape, seen.tensor.stride())[2:4, ..., ROWS : 2 * ROWS]  # row ROWS, slab 1
    here.copy_(plain.view(seen.box))
    assert torch.equal(out[COLUMNS:, ROWS : 2 * ROWS], tile.t())
    assert torch.count_nonzero(out >= 0) == ROWS * COLUMNS


def test_codes_of_the_derivative(product):
    """A byte holds all of gelu' evenly, 0 and 1 exactly."""
    text = nvrtc._source("gelu.cuh")
    assert f"CODES = {product.CODES}, CODE_OF_ZERO = {product.CODE_OF_ZERO}," in text
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(x, approximate="tanh").sum(), x)
    codes = (slope * product.CODES + product.CODE_OF_ZERO).round()
    assert (codes.min(), codes.max()) == (0, 254), "255 is NaN's"
    read = (codes - product.CODE_OF_ZERO) / product.CODES
    assert (read - slope).abs().max() <= 0.5 / product.CODES
    assert (read[0], read[-1]) == (0, 1)
    density = torch.exp(-x.detach().square() / 2)  # h of unit variance
    error, size = ((density * y.square()).sum().sqrt() for y in (read - slope, slope))
    assert error / size == pytest.approx(0.0021, rel=0.03)  # what the module's docstring says
    assert ((density * (read - slope)).sum() / (density * slope).sum()).abs() < 1e-5, "no bias"


# Who uses them: the MLP of a layer


@pytest.fixture
def mlp(product, monkeypatch):
    """Makes an MLP of 128 and 256 channels whose GEMMs are only noted, under its settings; and the notes."""
    linear, gelu = (importlib.import_module(f"gpt2_fp8.layers.{name}") for name in ("fp8_linear", "fp8_gelu"))
    from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales

    notes = []

    def noted(module, name, result):
        monkeypatch.setattr(module, name, lambda *given, **more: notes.append((name, more)) or result(*given))

    q, qt = torch.zeros(64, 256), torch.zeros(256, 64)
    noted(linear, "matmul", lambda a, b, out, *_: out)
    noted(linear, "weight_gradient", lambda a, bt, out, *_: out)
    noted(gelu, "gelu_cast", lambda h, slot: q)
    noted(gelu, "gelu_backward_cast", lambda *given: (q, qt, qt, "sums"))
    noted(gelu, "product_gelu", lambda operands, bias, slot: product.Activated(q, "slopes"))
    noted(gelu, "product_gelu_backward", lambda *given: product.ActivatedGradient(q, "sums"))
    noted(gelu, "add_vector_gradient", lambda *given: None)

    def make(fits, fast=False):
        monkeypatch.setattr(gelu, "fits", lambda a, b: fits)
        scales = Scales(DelayedScaling(16, 0, False, torch.float8_e4m3fn, torch.float8_e5m2, fast))
        fc1, fc2 = linear.FP8Linear(scales), linear.FP8Linear(scales)
        scales.allocate(torch.device("cpu"))
        fc1.w8, fc1.w8t = fc2.w8t, fc2.w8 = torch.zeros(256, 128), torch.zeros(128, 256)
        weights = {"fc1_weight": torch.zeros(256, 128), "fc2_weight": torch.zeros(128, 256)}
        weights = {name: torch.nn.Parameter(value) for name, value in weights.items()}
        return SimpleNamespace(fc1=fc1, fc2=fc2, weights=SimpleNamespace(**weights, fc1_bias=None), gelu=gelu)

    return make, notes


@pytest.mark.parametrize("fast", [False, True])
def test_sums_are_promoted_where_the_settings_say_so(mlp, fast):
    make, notes = mlp
    fc1 = make(fits=False, fast=fast).fc1
    fc1.forward(torch.zeros(64, 128))
    fc1.input_gradient(torch.zeros(64, 256))
    fc1.add_weight_gradient(torch.nn.Parameter(torch.zeros(256, 128)), torch.zeros(256, 64), torch.zeros(128, 64))
    forward, gradient, weight = (more for _, more in notes)
    assert forward["fast_accumulate"] is True
    assert gradient["fast_accumulate"] is fast
    assert not weight.get("fast_accumulate", False)


def of_a_pass(made):
    """A forward, another one for a backward, and that backward."""
    x8, given = torch.zeros(64, 128), (torch.zeros(64, 128), torch.zeros(128, 64))
    assert made.gelu.forward(made.fc1, made.fc2, x8)[0].shape == (64, 256)
    _, kept = made.gelu.forward(made.fc1, made.fc2, x8, again=True)
    made.gelu.backward(made.fc1, made.fc2, made.weights, given, kept, given[1])
    assert made.weights.fc1_weight.grad.shape == (256, 128)
    assert made.weights.fc2_weight.grad.shape == (128, 256)


def test_gelu_is_in_the_products_where_they_fit(mlp):
    make, notes = mlp
    of_a_pass(make(fits=True))
    assert [name for name, _ in notes] == [
        "product_gelu", "product_gelu",
        "product_gelu_backward", "weight_gradient", "weight_gradient", "add_vector_gradient", "matmul",
    ]  # fmt: skip
    assert [more.get("transposed", False) for name, more in notes if name == "weight_gradient"] == [True, False]


def test_elsewhere_products_and_kernels_do_it(mlp):
    make, notes = mlp
    of_a_pass(make(fits=False))
    assert [name for name, _ in notes] == [
        "matmul", "gelu_cast", "matmul",
        "matmul", "gelu_backward_cast", "matmul", "matmul", "add_vector_gradient", "matmul",
    ]  # fmt: skip
