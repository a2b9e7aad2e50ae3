"""The shapes in which layer normalisation is launched, on the CPU: every width has one that a GPU can take."""

import pytest

from gpt2_fp8.config.backend_support import WIDEST_COLUMNS
from tests.layers.standins import families

BLOCK_BYTES = 227 * 1024  # of shared memory, at most
PROCESSORS = 132


@pytest.fixture(scope="module")
def layer_norm():
    with families():
        from gpt2_fp8.kernels import layer_norm

        yield layer_norm


@pytest.mark.parametrize("m", [16, 2048, 4240, 16384, 65536])
def test_every_width_has_a_shape_that_can_be_launched(layer_norm, m):
    for n in range(16, WIDEST_COLUMNS + 1, 16):
        threads = layer_norm._threads(n)
        assert n <= 4 * threads <= 4096, "a thread has four columns"
        forward = layer_norm._forward_shape(n, m, PROCESSORS)
        backward = [layer_norm._backward_shape(n, m, PROCESSORS, tensors) for tensors in (2, 3)]
        for tensors, (rows, blocks, tile, stages, shared_bytes) in enumerate([forward, *backward], 1):
            piece = rows * n * 2 * tensors + (8 * rows if tensors > 1 else 0)
            assert rows % 4 == 0, "the copy engine brings 16 bytes of the rows' statistics, and words hold four rows"
            assert (tile % rows, tile % 16) == (0, 0)
            words = tile * (-(-n // 32) * 32)
            assert shared_bytes == -(-stages * piece // 128) * 128 + words
            # static: two arrays of the warps' sums, and barriers
            static = 2 * 4 * (threads // 32) * rows * (2 if tensors > 1 else 1) + 8 * stages
            assert shared_bytes + static <= BLOCK_BYTES
            assert blocks * (shared_bytes + static + 1024) <= 228 * 1024
            assert blocks * threads <= 2048


def test_the_widest_rows_have_the_most_threads_of_a_block(layer_norm):
    assert layer_norm._threads(WIDEST_COLUMNS) == 1024
