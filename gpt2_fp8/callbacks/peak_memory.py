"""The peak GPU memory of training and of validation, measured separately."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class PeakMemory(pl.Callback):
    """`training_gb` and `validation_gb`: peaks of allocated memory so far, GiB; None on a CPU, or before the first.

    A validation's peak includes what training keeps meanwhile: weights, optimizer state, recorded graphs.
    """

    def __init__(self) -> None:
        self.training_gb: float | None = None
        self.validation_gb: float | None = None

    @property
    def peak_gb(self) -> float | None:
        """Return the larger of the two, up to now."""
        self._training()
        return max((x for x in (self.training_gb, self.validation_gb) if x is not None), default=None)

    def on_validation_start(self, *_: Any) -> None:
        """Take the peak so far as training's, and reset it."""
        self._training()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def on_validation_end(self, *_: Any) -> None:
        """Take the peak since the start as validation's, and reset it."""
        if torch.cuda.is_initialized():
            self.validation_gb = max(self.validation_gb or 0.0, _allocated())
            torch.cuda.reset_peak_memory_stats()

    def _training(self) -> None:
        if torch.cuda.is_initialized():
            self.training_gb = max(self.training_gb or 0.0, _allocated())


def _allocated() -> float:
    return torch.cuda.max_memory_allocated() / 2**30
