"""Which way a micro-batch's rows go through the fused head, of chunks whose kernels do not run."""

from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8.kernels import nvrtc
from tests.layers.standins import families

ON_HOPPER = (9, 0), None


@pytest.fixture(scope="module")
def head():
    with families():
        from gpt2_fp8.layers import head

        yield head


@pytest.mark.parametrize(
    ("chunks", "width", "device", "expected"),
    [
        ([16384], 768, ON_HOPPER, True),
        ([16384, 16384], 1024, ON_HOPPER, True),
        ([16384, 64], 768, ON_HOPPER, True),
        ([8192, 8192], 768, ON_HOPPER, True),  # they count together
        ([16320], 768, ON_HOPPER, False),  # too few
        ([16384, 80], 768, ON_HOPPER, False),  # the last has no whole tiles
        ([8208, 8240], 768, ON_HOPPER, False),  # nor have these, though both together would
        ([16384], 1280, ON_HOPPER, False),
        ([16384], 768, ((10, 0), None), False),
        ([16384], 768, ((9, 0), "cuda-core is not installed"), False),
    ],
)
def test_probabilities_are_of_micro_batches_whose_every_chunk_fits(monkeypatch, head, chunks, width, device, expected):
    capability, missing = device
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(nvrtc, "why_missing", lambda: missing)
    empty = lambda rows: torch.empty(rows, width, dtype=torch.float8_e4m3fn, device="meta")  # noqa: E731
    of = SimpleNamespace(linear=SimpleNamespace(w8=empty(50304)))
    given = [head.Chunk(of, empty(rows), None, 50257, slice(0, rows)) for rows in chunks]
    assert head.fit_without_logits(given) is expected


@pytest.mark.parametrize(
    ("rows", "n_embd", "missing", "exponent"),
    [
        (65536, 768, None, 11),
        (16384, 1024, None, 11),
        (16320, 768, None, 15),  # too few rows
        (16400, 768, None, 15),  # no multiple of 64
        (65536, 1280, None, 15),  # too wide
        (65536, 768, "cuda-core is not installed", 15),
    ],
)
def test_the_factor_is_that_of_the_way_it_goes(monkeypatch, head, rows, n_embd, missing, exponent):
    monkeypatch.setattr(nvrtc, "why_missing", lambda: missing)
    of = SimpleNamespace(weight=torch.empty(50304, n_embd, device="meta"))
    assert head.Head.gradient_factor(of, rows) == 2.0**exponent
