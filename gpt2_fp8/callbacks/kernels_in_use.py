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
        size: the micro-batch that the run begins with.

    Attributes:
        found: what computes them now.
    """

    def __init__(self, kernels: Callable[[int], dict[str, str]], size: int):
        self._kernels, self._size = kernels, size
        self.found = kernels(size)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Ask again if the micro-batch is another one."""
        if (size := pl_module.step.micro_batch_size) == self._size:
            return
        self._size, before = size, self.found
        self.found = self._kernels(size)
        if self.found != before and trainer.is_global_zero:
            log.info("layers     %s", in_words(self.found))


def in_words(kernels: Mapping[str, str], slower: Sequence[str] = ()) -> str:
    """Return which layers compute a run, and by which kernels; `slower`: why they are not the fastest there are."""
    parts = [words if part == "layers" else f"{part} {words}" for part, words in kernels.items()]
    return "; ".join(parts + ([f"slower than it could be: {', '.join(slower)}"] if slower else []))
