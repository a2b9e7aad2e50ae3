"""How the numbers of weights and gradients are distributed, counted on their device.

Only counts leave it, and nothing waits for them before `read`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BINS = 64  # of equal width, from minus the largest absolute value to that value
_CHUNK = 1 << 24  # numbers counted at once: float32 counts to this exactly
Kind = Literal["gradient", "weight"]


@dataclass(frozen=True)
class TensorStats:
    """A tensor's distribution. `counts[i]` numbers lie between `edges[i]` and `edges[i + 1]`."""

    name: str
    kind: Kind
    amax: float  # the largest absolute value
    sum: float
    squares: float  # the sum of squares
    counts: list[float]

    @property
    def norm(self) -> float:
        """Return the L2 norm."""
        return math.sqrt(self.squares)

    @property
    def edges(self) -> list[float]:
        """Return the bounds of the bins, one more than there are bins."""
        half = self.amax or 1e-12  # TensorBoard wants edges that rise
        return [half * (2 * i / BINS - 1) for i in range(BINS + 1)]


@torch.no_grad()
def count(tensors: Sequence[Tensor]) -> Tensor:
    """Count each tensor, of any shape and floating dtype: float64 [tensors, 3 + BINS] on their device.

    A row holds the largest absolute value, the sum, the sum of squares, and the counts. The host does not wait. Copies
    take 128 MiB of memory at most.
    """
    with _counting():
        return torch.stack([_count(tensor.detach().reshape(-1)) for tensor in tensors])


def _count(values: Tensor) -> Tensor:
    amax = torch.linalg.vector_norm(values, math.inf)
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)).float()
    chunks = values.split(_CHUNK)
    counts = sum(torch.histc(chunk.float() / scale, BINS, -1, 1).double() for chunk in chunks)
    assert isinstance(counts, Tensor)
    norms = torch.stack(
        [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]
    )  # a CPU rounds float32
    squares = norms.square().sum()
    return torch.cat([torch.stack([amax.double(), values.sum().double(), squares]), counts])


@contextmanager
def _counting() -> Iterator[None]:
    """Allow torch's counting on a GPU under `trainer.deterministic`: counts below 2^24 are exact in any order."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def read(names: Sequence[str], kind: Kind, counted: Tensor, divisor: float = 1.0) -> list[TensorStats]:
    """Read what `count` has counted, once for all tensors; waits for the device.

    `divisor`: what the tensors were multiplied by. Tensors with a number that is not finite are left out.
    """
    found = []
    for name, (amax, total, squares, *counts) in zip(names, counted.tolist(), strict=True):
        if math.isfinite(amax) and math.isfinite(squares):
            found.append(TensorStats(name, kind, amax / divisor, total / divisor, squares / divisor**2, counts))
    return found
