"""The most GPU memory that training and validation have used, apart."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class PeakMemory(pl.Callback):
    """`training_gb` and `validation_gb`: peaks of allocated memory so far, GiB; None on a CPU, or before the first.

    A validation's peak has what training keeps meanwhile in it: weights, moments, recorded graphs.
    """

    def __init__(self) -> None:
        self.training_gb: float | None = None
        self.validation_gb: float | None = None

    @property
    def peak_gb(self) -> float | None:
        """The larger of the two, what is under way included."""
        self._training()
        return max((x for x in (self.training_gb, self.validation_gb) if x is not None), default=None)

    def on_validation_start(self, *_: Any) -> None:
        """What was until now is training's."""
        self._training()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def on_validation_end(self, *_: Any) -> None:
        """What was since is validation's."""
        if torch.cuda.is_initialized():
            self.validation_gb = max(self.validation_gb or 0.0, _allocated())
            torch.cuda.reset_peak_memory_stats()

    def _training(self) -> None:
        if torch.cuda.is_initialized():
            self.training_gb = max(self.training_gb or 0.0, _allocated())


def _allocated() -> float:
    return torch.cuda.max_memory_allocated() / 2**30
