"""Ranks that should train the same weights: what tells that they do not, and whom it names."""

import string

import pytest
import torch

from gpt2_fp8.config.errors import Drifted
from gpt2_fp8.engine import replicas
from gpt2_fp8.engine.replicas import check_replicas, checksum

RANDOM = torch.Generator().manual_seed(0)
WEIGHTS = [torch.randn(shape, generator=RANDOM) for shape in ((5, 8), (5, 8), (8,), (2, 3, 4))]


def test_every_bit_and_every_place_counts():
    before = checksum(WEIGHTS)
    for number, tensor in enumerate(WEIGHTS):
        for bit in range(32):
            other = [weight.clone() for weight in WEIGHTS]
            other[number].view(torch.int32).view(-1)[tensor.numel() // 2] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert checksum(other) != before
    one, two, *rest = WEIGHTS
    assert len({before, checksum([two, one, *rest]), checksum([one.flip(0), two, *rest])}) == 3
    assert checksum([weight.t().contiguous().t() if weight.dim() == 2 else weight for weight in WEIGHTS]) == before


@pytest.mark.parametrize(
    ("sums", "named"),
    [([7, 7, 8, 7], r"rank 2 \(on c\) differ from those of rank 0 "),
     ([8, 7, 7, 9], r"ranks 0 \(on a\), 3 \(on d\) differ from those of rank 1 "),
     ([7, 8], r"rank 1 \(on b\) differ from those of rank 0 "),
     ([7] * 11 + [*range(8, 18)], r"ranks 11 \(on l\), .*, 18 \(on s\) and 2 more differ from those of rank 0 ")],
)  # fmt: skip
def test_the_ranks_that_differ_from_most_are_named(monkeypatch, sums, named):
    model = torch.nn.ParameterList(WEIGHTS)
    monkeypatch.setattr(replicas.collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(replicas.collectives, "everyones", lambda own: [*zip(sums, string.ascii_letters, strict=False)])
    with pytest.raises(Drifted, match=named + "after step 3, which is not saved"):
        check_replicas(model, 3)
    monkeypatch.setattr(replicas.collectives, "everyones", lambda own: [own] * 4)
    check_replicas(model, 3)
