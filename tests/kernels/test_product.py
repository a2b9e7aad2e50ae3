"""What the products with an epilogue assume of themselves, on the CPU: their shapes, shared memory and codes.

Their numbers, and so the order in which rows and columns lie there, are tested on a GPU (tests/gpu).
"""

import re

import pytest
import torch

from gpt2_fp8.kernels import nvrtc, product

BLOCK_BYTES = 227 * 1024  # of shared memory, at most
KERNELS = ["product_activation", "product_activation_backward", "product_probabilities"]


def memory_bytes(k, stages, staged=0):
    """sizeof(Memory), or of StagedMemory: staged results, slab, ring, and two arrays of barriers."""
    lines = k // product.LINE * product.COLUMNS + product.WARPGROUPS * stages * product.ROWS
    return product.WARPGROUPS * staged + lines * product.LINE + 2 * product.WARPGROUPS * stages * 8


@pytest.mark.parametrize("name", KERNELS)
def test_the_members_are_those(name):
    """What `memory_bytes` adds up is what the struct holds."""
    text = nvrtc._source(f"{name}.cu")
    if "StagedMemory" in text:
        assert "struct StagedMemory {\n  u8 staged[WARPGROUPS][STAGED];" in text
        assert "STAGED = ROWS * COLUMNS;" in text
    body = re.search(r"struct Memory \{(.*?)\n\};", text, re.DOTALL)[1]
    assert re.findall(r"(u8|u64) (.*?);", re.sub(r"//.*", "", body)) == [
        ("u8", "slab[LINES][SLAB]"),
        ("u8", "ring[WARPGROUPS][STAGES][CHUNK]"),
        ("u64", "full[WARPGROUPS][STAGES], empty[WARPGROUPS][STAGES]"),
    ]
    assert "CHUNK = ROWS * LINE, SLAB = COLUMNS * LINE" in text


@pytest.mark.parametrize("staged", [0, product.STAGED])
@pytest.mark.parametrize("k", range(128, 2049, 128))
def test_shared_memory(k, staged):
    shape = product.shape_of(k, staged)
    assert (product.why_no_product(64, 128, k, staged) is None) is (k <= 1024)
    if shape.stages >= 1:
        assert shape.shared_bytes == memory_bytes(k, shape.stages, staged) <= BLOCK_BYTES
        assert shape.stages == product.MOST_STAGES or memory_bytes(k, shape.stages + 1, staged) > BLOCK_BYTES


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((64, 128, 128), True), ((192, 384, 1024), True)]
    + [((128, 128, k), False) for k in (64, 192, 1280, 1600, 2048)]
    + [((m, 128, 128), False) for m in (16, 96)]
    + [((128, n, 128), False) for n in (64, 192)],
)
def test_what_fits(shape, expected):
    m, n, k = shape
    a, b = (torch.empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, n))
    assert product.fits(a, b) is expected


def test_parts_are_counted_right():
    """Against a count of the blocks that have a tile of each slab."""
    for grid in (1, 2, 3, 7, 16, 131, 132):
        for down in (1, 2, 3, 7, 64, 65):
            for slabs in (1, 2, 3, 24, 133):
                if grid > (tiles := down * slabs):
                    continue
                blocks = [set() for _ in range(slabs)]
                for block in range(grid):
                    for tile in range(block * tiles // grid, (block + 1) * tiles // grid):
                        blocks[tile // down].add(block)
                assert product._parts(grid, down, slabs) == max(map(len, blocks)), (grid, down, slabs)


def test_codes_of_the_derivative():
    """A byte holds all of gelu' evenly, 0 and 1 exactly."""
    codes_of, zero = product.CODES, product.CODE_OF_ZERO
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(x, approximate="tanh").sum(), x)
    codes = (slope * codes_of + zero).round()
    assert (codes.min(), codes.max()) == (0, 254), "255 is NaN's"
    read = (codes - zero) / codes_of
    assert (read - slope).abs().max() <= 0.5 / codes_of
    assert (read[0], read[-1]) == (0, 1)
    density = torch.exp(-x.detach().square() / 2)  # h of unit variance
    error, size = ((density * y.square()).sum().sqrt() for y in (read - slope, slope))
    assert error / size == pytest.approx(0.0021, rel=0.03)  # what the module's docstring says
    assert ((density * (read - slope)).sum() / (density * slope).sum()).abs() < 1e-5, "no bias"
