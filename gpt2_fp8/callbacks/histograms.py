"""Histograms of weights and gradients, and each matrix' gradient norm, at an interval.

They are counted on the tensors' device. Only counts leave it, and nothing waits for them before `read`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.runtime import sharding

log = logging.getLogger(__name__)

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
    take 128 MiB of memory at most. Of tensors that are divided among ranks, each rank counts its part; collective then.
    """
    own, group = [sharding.local(tensor.detach()).reshape(-1) for tensor in tensors], sharding.group_of(tensors[0])
    with _allow_counting():
        amaxes = torch.stack([_amax(values) for values in own])
        if group is not None:
            torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)
        counted = torch.stack([_count(*each) for each in zip(own, amaxes, strict=True)])
        if group is None:
            return counted
        parts = counted[:, 1:].contiguous()
        torch.distributed.all_reduce(parts, group=group)
        return torch.cat([amaxes.double()[:, None], parts], dim=1)


def _amax(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, math.inf) if values.numel() else values.new_zeros(())


def _count(values: Tensor, amax: Tensor) -> Tensor:
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)).float()
    chunks = values.split(_CHUNK)
    counts = sum(torch.histc(chunk.float() / scale, BINS, -1, 1).double() for chunk in chunks)
    assert isinstance(counts, Tensor)
    norms = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]  # a CPU rounds float32
    squares = torch.stack(norms).square().sum()
    return torch.cat([torch.stack([amax.double(), values.sum().double(), squares]), counts])


@contextmanager
def _allow_counting() -> Iterator[None]:
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


class Histograms(pl.Callback):
    """Gives the loggers that have `log_histograms` the distribution of every matrix and of its gradient, on rank 0.

    After the first step, every `every_n_steps` steps, and after the step `last_step`. Gradients are those of the whole
    step, before clipping; weights those after the update. In other steps nothing is done, and nothing waits.
    """

    def __init__(self, every_n_steps: int, last_step: int):
        self.every_n_steps, self.last_step = every_n_steps, last_step
        self._gradients: tuple[list[str], Tensor] | None = None
        self._failed = False

    def _due(self, step: int) -> bool:
        return step in (1, self.last_step) or step % self.every_n_steps == 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Count the gradients while they are there. They have been clipped in place by now."""
        logs = trainer.is_global_zero or sharding.is_divided(pl_module.model)
        if not logs or self._failed or not self._due(trainer.global_step + 1):
            return
        found = [(name, weight.grad) for name, weight in _matrices(pl_module) if weight.grad is not None]
        try:
            self._gradients = [name for name, _ in found], count([gradient for _, gradient in found])
        except Exception as error:
            self._give_up(error, trainer.global_step + 1)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Count the weights, read both, and log."""
        step = trainer.global_step
        if not self._due(step):
            return
        result = pl_module.step.last  # settles, on all ranks
        gradients, self._gradients = self._gradients, None
        if gradients is None or result is None:
            return
        found, weights = list[TensorStats](), dict(_matrices(pl_module))
        try:
            if result.first is None and not result.read().skipped:  # else they are of an attempt that was given up
                found = read(gradients[0], "gradient", gradients[1], result.read().clip_ratio)
            found += read(list(weights), "weight", count(list(weights.values())))
        except Exception as error:
            self._give_up(error, step)
            return
        for logger in trainer.loggers:
            if write := getattr(logger, "log_histograms", None):  # train/loggers.py
                write(found, step)

    def _give_up(self, error: Exception, step: int) -> None:
        """Go on without histograms: what only looks does not end a run. Raises what does, such as a signal's."""
        if isinstance(error, RunError):
            raise error
        self._failed, self._gradients = True, None
        reason = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        log.warning("no histograms from step %d on (%s); training goes on", step, reason)


def _matrices(pl_module: Any) -> list[tuple[str, Any]]:
    return [(name, weight) for name, weight in pl_module.model.named_parameters() if weight.ndim >= 2]
