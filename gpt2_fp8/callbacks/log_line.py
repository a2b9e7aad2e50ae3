"""The training log as a person reads it: a line an interval, a line a validation, and how long the run will take."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl

from gpt2_fp8.config.run_length import steps_to_run, tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import counted, duration

log = logging.getLogger(__name__)

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
                     counted(more, "more step"), f"{self._tokens:,}", f"{rate:,.0f}", duration(left))  # fmt: skip

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
