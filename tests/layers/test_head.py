"""Which way a micro-batch's rows go through the fused head, of chunks whose kernels do not run."""

from types import SimpleNamespace

import pytest
import torch

from tests.layers.standins import families


@pytest.fixture(scope="module")
def head():
    with families():
        from gpt2_fp8.layers import head

        yield head


@pytest.mark.parametrize(
    ("chunks", "width", "expected"),
    [
        ([16384], 768, True),
        ([16384, 16384], 1024, True),
        ([16384, 64], 768, True),
        ([8192, 8192], 768, True),  # they count together
        ([16320], 768, False),  # too few
        ([16384, 80], 768, False),  # the last has no whole tiles
        ([8208, 8240], 768, False),  # nor have these, though both together would
        ([16384], 1280, False),
    ],
)
def test_probabilities_are_of_micro_batches_whose_every_chunk_fits(head, chunks, width, expected):
    empty = lambda rows: torch.empty(rows, width, dtype=torch.float8_e4m3fn, device="meta")  # noqa: E731
    of = SimpleNamespace(linear=SimpleNamespace(w8=empty(50304)))
    given = [head.Chunk(of, empty(rows), None, 50257, slice(0, rows)) for rows in chunks]
    assert head.fit_without_logits(given) is expected


@pytest.mark.parametrize(
    ("rows", "n_embd", "exponent"),
    [
        (65536, 768, 11),
        (16384, 1024, 11),
        (16320, 768, 15),  # too few rows
        (16400, 768, 15),  # no multiple of 64
        (65536, 1280, 15),  # too wide
    ],
)
def test_the_factor_is_that_of_the_way_it_goes(head, rows, n_embd, exponent):
    of = SimpleNamespace(weight=torch.empty(50304, n_embd, device="meta"))
    assert head.Head.gradient_factor(of, rows) == 2.0**exponent
