"""The progress bar: one line at the bottom of a terminal, in optimizer steps, with log lines above it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from gpt2_fp8.config.shown import duration
from gpt2_fp8.engine.pace import Pace

_EVERY = 0.5  # seconds between two drawings
_WIDEST, _NARROWEST = 30, 8  # columns of the bar itself


class ProgressBar(LightningBar):
    """Draws the bar on standard output, on rank 0, if that is a terminal which can redraw a line.

    It is drawn between two steps or batches, with what the host knows: no number is read from the GPU for it, and no
    thread draws. What the log and others print meanwhile stands above it, without the log's lines of intervals, whose
    numbers it shows.

    Args:
        pace: tells the time that is left.
        clock: gives seconds.
    """

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self.line = BarLine(pace.last_step)
        self._pace, self._clock = pace, clock
        self._enabled = True
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler, TextIO]] = []
        self._drawn_at = 0.0

    def disable(self) -> None:
        """Draw nothing, as on other ranks than 0."""
        self._enabled = False

    def enable(self) -> None:
        """Draw again."""
        self._enabled = True

    def read(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the newest numbers of `Throughput`."""
        self.line.loss, self.line.rate = metrics["train_loss"], metrics.get("tokens_per_second")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to draw."""
        self.line.step = trainer.global_step
        if self._enabled and self._live is None and _redraws():
            self._begin()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Move on a step."""
        self.line.step, self.line.left = trainer.global_step, self._pace.left(trainer.global_step)
        self._draw()

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Show how far a validation is."""
        batches = trainer.num_val_batches[dataloader_idx]
        self.line.validated = f"validation {batch_idx + 1}/{batches}"
        self._draw()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Show its loss."""
        self.line.validated = "" if pl_module.val_loss is None else f"val_loss {pl_module.val_loss:.4f}"
        self._draw()

    def on_train_end(self, *_: Any) -> None:
        """Leave the bar as it is, and the terminal as it was."""
        self.stop()

    def on_exception(self, *_: Any) -> None:
        """Do the same."""
        self.stop()

    def _begin(self) -> None:
        console = Console()
        self._live = Live(self.line, console=console, auto_refresh=False)
        self._live.start()
        console.show_cursor(True)  # so that a process that is killed leaves no terminal without a cursor
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                self._handlers.append((handler, handler.stream))
                handler.setStream(sys.stdout)  # rich's, which prints above the bar
                handler.addFilter(_no_interval)
        self._draw(now=True)

    def stop(self) -> None:
        """End the drawing, if it has begun."""
        if self._live is None:
            return
        live, self._live = self._live, None
        live.stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)
            handler.removeFilter(_no_interval)
        self._handlers.clear()

    def _draw(self, now: bool = False) -> None:
        if self._live is None or (not now and self._clock() < self._drawn_at + _EVERY):
            return
        self._drawn_at = self._clock()
        self._live.refresh()


@dataclass
class BarLine:
    """What the bar shows, cut to the terminal's width."""

    total: int  # the run's last step
    step: int = 0  # the optimizer step that has ended
    loss: float | None = None  # the newest training loss, nats a token
    rate: float | None = None  # tokens a second over all ranks
    left: float | None = None  # seconds to the end of the run
    validated: str = ""  # where a validation is, or its result

    def text(self, columns: int) -> str:
        """Return what stands beside the bar: as much of it as has room in `columns`, the most useful first."""
        parts = [
            f"{self.step:,}/{self.total:,}",
            "" if not self.left else f"left {duration(self.left)}",
            "" if self.loss is None else f"loss {self.loss:.4f}",
            self.validated,
            "" if self.rate is None else f"{self.rate:,.0f} tok/s",
        ]
        shown = ""
        for part in filter(None, parts):
            longer = f"{shown}  {part}" if shown else part
            if len(longer) > columns and shown:
                break
            shown = longer
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw one row that is at least a column narrower than the terminal, since a full row may wrap."""
        columns = options.max_width - 1
        text = self.text(columns - _NARROWEST - 1)
        bar = min(_WIDEST, columns - len(text) - 1)
        if bar < _NARROWEST:
            yield Text(text[: max(columns, 1)], no_wrap=True)
            return
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row(Bar(total=self.total, completed=self.step, width=bar), Text(text, no_wrap=True))
        yield row


def _redraws() -> bool:
    """Return whether a line can be redrawn: on a terminal that is not dumb, unless NO_COLOR asks for plain text."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal and not os.environ.get("NO_COLOR")


def _no_interval(record: logging.LogRecord) -> bool:
    return not getattr(record, "interval", False)
