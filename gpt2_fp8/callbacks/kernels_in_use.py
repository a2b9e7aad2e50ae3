"""Which kernels compute a run: told again where a smaller micro-batch takes others than those it began with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl

log = logging.getLogger(__name__)


class KernelsInUse(pl.Callback):
    """Knows what computes each part of the model, for the summary, and logs its line `layers` anew when that changes.

    A micro-batch that does not fit becomes smaller, and some kernels are worth their price from a number of rows on.

    Args:
        kernels: returns what computes micro-batches of so many sequences, by the part of the model, in words.
        size: the micro-batch that was told when the run was announced. A checkpoint may know a smaller one.
        slower: why they are not the fastest there are.

    Attributes:
        found: what computes them now.
    """

    def __init__(self, kernels: Callable[[int], dict[str, str]], size: int, slower: Sequence[str]):
        self._kernels, self._size, self._slower = kernels, size, slower
        self.found = kernels(size)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Ask again if the checkpoint has another micro-batch."""
        self._look(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Ask again if the micro-batch has become another one."""
        self._look(trainer, pl_module)

    def _look(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if (size := pl_module.step.micro_batch_size) == self._size:
            return
        self._size, before = size, self.found
        self.found = self._kernels(size)
        if self.found != before and trainer.is_global_zero:
            tell(self.found, self._slower)


def tell(kernels: Mapping[str, str], slower: Sequence[str]) -> None:
    """Log the line `layers`: a warning if there are faster kernels; `slower` says why they are not used."""
    log.log(logging.WARNING if slower else logging.INFO, "layers     %s", _in_words(kernels, slower))


def _in_words(kernels: Mapping[str, str], slower: Sequence[str]) -> str:
    """Return which layers compute a run, and by which kernels."""
    parts = [words if part == "layers" else f"{part} {words}" for part, words in kernels.items()]
    return "; ".join(parts + ([f"slower than it could be: {', '.join(slower)}"] if slower else []))
