"""Training as a person reads it: a line an interval, a line and a sample a validation, and a bar on a terminal."""

from __future__ import annotations

import logging
import math
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

from gpt2_fp8.config.run_length import steps_to_run, tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import duration, format_count
from gpt2_fp8.engine.out_of_memory import check_undivided, is_out_of_memory
from gpt2_fp8.model.generate import decode_after, generate
from gpt2_fp8.runtime import collectives, sharding, signals

log = logging.getLogger(__name__)

_EVERY = 0.5  # seconds between two drawings of the bar
_FEW_STEPS, _MANY_STEPS, _LONG_ENOUGH = 2, 9, 2.0  # steps, steps, seconds: when the first steps tell enough


class LogLine(pl.Callback):
    """Writes what `Throughput` has read to the run's log, on rank 0.

    Args:
        config: the run's.
        time_left: returns the seconds that `trainer.max_time` leaves, None without such a limit.
        best: returns the lowest validation loss before the present one and its step, or None.
    """

    def __init__(
        self,
        config: RunConfig,
        time_left: Callable[[], float | None],
        best: Callable[[], tuple[float, int] | None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self._tokens = steps_to_run(config), tokens_a_step(config)
        self._time_left, self._best, self._clock, self._told = time_left, best, clock, False
        self._steps, self._seconds, self._began = 0, 0.0, 0.0  # after the first step, which compiles and calibrates

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to measure, also after a rollback."""
        self._steps, self._seconds = -1, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note the step's end, and tell once how long the run will take."""
        self._steps += 1
        if not self._steps:
            self._began = self._clock()
        self._seconds = self._clock() - self._began
        steps, seconds, more = self._steps, self._seconds, self.total - trainer.global_step
        if self._told or not (steps >= _MANY_STEPS or (steps >= _FEW_STEPS and seconds >= _LONG_ENOUGH)):
            return
        self._told = True
        if more > 0:
            left, rate = self.left(trainer.global_step), steps * self._tokens / seconds
            assert left is not None
            log.info("%s of %s tokens at %s tokens/s: about %s",
                     format_count(more, "more step"), f"{self._tokens:,}", f"{rate:,.0f}", duration(left))  # fmt: skip

    def left(self, step: int) -> float | None:
        """Return the seconds from `step` to the end of the run by the host's clock; None before two steps have ended.

        They include validations and checkpoints.
        """
        if self._steps < 1:
            return None
        seconds, limit = (self.total - step) * self._seconds / self._steps, self._time_left()
        return seconds if limit is None else max(min(seconds, limit), 0.0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of an interval that ends with `step`. `metrics` are those of `Throughput`."""
        text = interval(step, self.total, metrics, self.left(step))
        log.info(text, extra={"interval": True})  # a progress bar shows these in its own way

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write the line of a validation. `best` does not know of it yet: checkpoints are taken after this."""
        loss, best = pl_module.val_loss, self._best()
        if trainer.sanity_checking or loss is None:
            return
        log.info(validation(trainer.global_step, self.total, loss, best))


def interval(step: int, total: int, metrics: Mapping[str, float], left: float | None) -> str:
    """Return the line of an interval, aligned, of at most 110 characters in a run of less than 100,000 steps.

    `metrics`: those of `Throughput`, without a speed at the first step. `left`: seconds, or None.
    """
    parts = [f"{_step(step, total)}  loss {metrics['train_loss']:6.4f}  lr {metrics['lr']:.1e}"]
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:>9,.0f} tok/s  {_milliseconds(metrics['step_time'])}")
        parts.append(f"{metrics['memory_gb']:5.1f} GiB  wait {100 * metrics['data_wait']:2.0f} %")
    if left:
        parts.append(f"left {duration(left)}")
    return "  ".join(parts)


def validation(step: int, total: int, loss: float, best: tuple[float, int] | None) -> str:
    """Return the line of a validation. `best`: the lowest loss before it and its step, or None."""
    if best is None:
        mark = "  best" if math.isfinite(loss) else ""
    else:
        mark = "  best" if loss < best[0] else f"  (best {best[0]:.4f} at step {best[1]:,})"
    return f"{_step(step, total)}  val_loss {loss:.4f}{mark}"


def _step(step: int, total: int) -> str:
    return f"step {step:>{len(f'{total:,}')},}/{total:,}"


def _milliseconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:4.0f} ms"
    return f"{seconds:5.2f} s" if seconds < 99 else f"{seconds:5.0f} s"


class Samples(pl.Callback):
    """Writes `tokens` tokens after `prompt` to the run's log and to TensorBoard (`sample`), on rank 0.

    If the model is divided among ranks, all of them compute the tokens.
    """

    def __init__(self, prompt: str, tokens: int, seed: int):
        self.prompt, self.tokens, self.seed = prompt, tokens, seed

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Draw one sample. The seed is the same each time, so that samples differ only by the model."""
        divided = sharding.is_divided(pl_module.model)
        if not (trainer.is_global_zero or divided) or trainer.sanity_checking:
            return
        stopped = (lambda: collectives.any_rank(signals.is_pending())) if divided else signals.is_pending
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        prompt = tokenizer.encode_ordinary(self.prompt)
        n_positions = pl_module.config.model.n_positions
        try:
            with pl_module.step.evaluation.forwards() as model:
                ids = generate(
                    model, prompt or [tokenizer.eot_token], self.tokens, pl_module.vocab_size, n_positions, self.seed,
                    stopped=stopped,
                )  # fmt: skip
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            check_undivided(pl_module.model, "a sample", "callbacks.sample_tokens=0")
            pl_module.step.exchange.give_up()
            log.warning("no sample at step %d: out of memory", trainer.global_step)
            return
        if signals.is_pending():
            log.info("no sample at step %d: the run is stopping", trainer.global_step)
            return
        known = [i for i in ids if i < tokenizer.n_vocab]
        text = self.prompt + decode_after(tokenizer.decode, prompt, known)
        log.info("sample at step %d: %r", trainer.global_step, text)
        for logger in trainer.loggers:
            if log_text := getattr(logger, "log_text", None):  # train/loggers.py, train/services.py
                log_text("sample", text, trainer.global_step)


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
        """End the drawing, if it has begun: leave the bar as it is, and the terminal as it was."""
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
