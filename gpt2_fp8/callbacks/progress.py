"""The progress bar: one line at the bottom of a terminal, in optimizer steps, with log lines above it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from gpt2_fp8.config.shown import duration

_EVERY = 0.5  # seconds between two drawings


class ProgressBar(LightningBar):
    """Draws the bar on standard output, on rank 0, if that is a terminal which can redraw a line.

    It is drawn between two steps or batches, with what the host knows: no number is read from the GPU for it, and no
    thread draws. What the log and others print meanwhile stands above it, without the log's lines of intervals, whose
    numbers it shows.

    Args:
        last_step: the run's.
        left: tells the seconds that are left at a step, if they are known.
    """

    def __init__(self, last_step: int, left: Callable[[int], float | None]):
        super().__init__()
        self._last_step, self._left = last_step, left
        self._enabled = True
        self._bar: Progress | None = None
        self._handlers: list[tuple[logging.StreamHandler, TextIO]] = []
        self._drawn_at = 0.0
        self._step = 0
        self._loss = self._validation = self._rate = ""

    def disable(self) -> None:
        """Draw nothing, as on other ranks than 0."""
        self._enabled = False

    def enable(self) -> None:
        """Draw again."""
        self._enabled = True

    def read(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the newest numbers of `Throughput`."""
        self._loss = f"loss {metrics['train_loss']:.4f}"
        self._rate = f"{metrics['tokens_per_second']:,.0f} tok/s" if "tokens_per_second" in metrics else ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to draw."""
        self._step = trainer.global_step
        if self._enabled and self._bar is None and _redraws():
            self._begin()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Move on a step."""
        self._step = trainer.global_step
        self._draw()

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Show how far a validation is."""
        self._validation = f"validation {batch_idx + 1}/{trainer.num_val_batches[dataloader_idx]}"
        self._draw()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Show its loss."""
        self._validation = "" if pl_module.val_loss is None else f"val_loss {pl_module.val_loss:.4f}"
        self._draw()

    def on_train_end(self, *_: Any) -> None:
        """Leave the bar as it is, and the terminal as it was."""
        self.stop()

    def on_exception(self, *_: Any) -> None:
        """Do the same."""
        self.stop()

    def _begin(self) -> None:
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
        self._bar = Progress(BarColumn(30), text, console=Console(), auto_refresh=False)
        self._bar.add_task("", total=self._last_step)
        self._bar.start()
        self._bar.console.show_cursor(True)  # so that a process that is killed leaves no terminal without a cursor
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                self._handlers.append((handler, handler.stream))
                handler.setStream(sys.stdout)  # rich's, which prints above the bar
                handler.addFilter(_no_interval)
        self._draw(now=True)

    def stop(self) -> None:
        """End the drawing, if it has begun."""
        if self._bar is None:
            return
        self._draw(now=True)
        bar, self._bar = self._bar, None
        bar.stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)
            handler.removeFilter(_no_interval)
        self._handlers.clear()

    def text(self) -> str:
        """Return what stands beside the bar, the most useful first: a narrow terminal cuts the end."""
        left = self._left(self._step)
        parts = [f"{self._step:,}/{self._last_step:,}", f"left {duration(left)}" if left else ""]
        return "  ".join(filter(None, [*parts, self._loss, self._validation, self._rate]))

    def _draw(self, now: bool = False) -> None:
        if self._bar is None or (not now and time.monotonic() < self._drawn_at + _EVERY):
            return
        self._drawn_at = time.monotonic()
        self._bar.update(self._bar.task_ids[0], completed=self._step, description=self.text(), refresh=True)


def _redraws() -> bool:
    """Return whether a line can be redrawn: on a terminal that is not dumb, unless NO_COLOR asks for plain text."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal and not os.environ.get("NO_COLOR")


def _no_interval(record: logging.LogRecord) -> bool:
    return not getattr(record, "interval", False)
