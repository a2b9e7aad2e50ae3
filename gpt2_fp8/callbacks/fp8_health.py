"""The health of FP8 in the logs: summaries at every interval, every tensor now and then, and red flags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl

from gpt2_fp8.compat import lightning_private as loops
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.fp8_health import FP8Health, Health, summary
from gpt2_fp8.engine.red_flags import FP8RedFlags
from gpt2_fp8.engine.step import StepResult
from gpt2_fp8.runtime import ranks, signals
from gpt2_fp8.runtime.collectives import any_rank
from gpt2_fp8.runtime.moments import Sent
from gpt2_fp8.runtime.sharding import is_divided

log = logging.getLogger(__name__)

Write = Callable[[int, Sequence[Health]], object]


class FP8HealthLog(pl.Callback):
    """Reads the stored scales every `trainer.log_every_n_steps` steps, and samples every tensor at a wider interval.

    Summaries go to the loggers (`engine.fp8_health.summary`), tensors to `write` and to the loggers that have
    `log_fp8_tensors`, red flags to the run's log. The scales are sent at the end of the step, and read once it is
    settled: while the GPU computes the next one, if that can be.

    A sampled pass is made after the first step, from then on every `callbacks.fp8_health_every_n_steps` steps, and
    after the last one in FP8. Steps that compute in bf16 have nothing to log.

    All is done by rank 0. The others wait for it in the next step. If the model is divided among them, they do as much,
    with sequences of their own, and log nothing. A run that casts nothing to FP8 has nothing to log.

    Args:
        config: the run's.
        write: is given the step and the health of every tensor; None: nothing is written.
    """

    def __init__(self, config: RunConfig, write: Write | None = None):
        self.config, self._write = config, write
        self.every_n_steps = config.trainer.log_every_n_steps
        self.interval = config.callbacks.fp8_health_every_n_steps
        self._health: FP8Health | None = None
        self._divided = False  # the model, among ranks
        self._row = 0  # the last step that was read
        self._sent: Sent | None = None  # of the last step, until it is settled

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Subscribe to each settled step."""
        pl_module.step.on_settled.append(partial(self._on_settled, trainer))

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin anew, with the module's training step."""
        self._health = self._sent = None
        logs, self._divided = trainer.is_global_zero, is_divided(pl_module.model)
        if (logs or self._divided) and pl_module.step.plan.recipe is not None:
            recipe = pl_module.step.plan.backend.recipe
            say = partial(log.warning if self.config.callbacks.red_flags and logs else log.debug, "%s")
            self._flags = FP8RedFlags(recipe, self.config.optim.warmup_steps, say)
            with self._only_looking(trainer.global_step):
                health = FP8Health(pl_module.step)
                self._health = health if health.tensors else None
        self._row = trainer.global_step // self.every_n_steps * self.every_n_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """Read, log and judge, at the end of an interval, or have that done once the step is settled."""
        step, steps_in_fp8 = trainer.global_step, pl_module.step.attempts.steps_in_fp8
        last = loops.is_last_step(trainer) or step == steps_in_fp8
        if step > steps_in_fp8 or (step % self.every_n_steps and not last and step > 1):
            return
        sampled = step == 1 or last or step // self.interval > self._row // self.interval
        settles = sampled or not pl_module.step.settles_while_computing
        if settles:
            pl_module.step.settle()
        self._row = step
        stops = self._health is None or signals.is_pending()
        if any_rank(stops) if self._divided and sampled else stops:
            return
        assert self._health is not None
        with self._only_looking(step):
            if settles:
                self._look(trainer, step, self._health.read(), batch["ids"] if sampled else None)
            else:
                self._sent = self._health.send()

    def _on_settled(self, trainer: pl.Trainer, result: StepResult) -> None:
        """Read what was sent at the end of the step; or what is there, if the step has been changed since."""
        sent, self._sent = self._sent, None
        if sent is not None and self._health is not None:
            changed = result.first is not None or result.read().amax_outliers
            with self._only_looking(trainer.global_step):
                self._look(trainer, trainer.global_step, self._health.read(None if changed else sent))

    def _look(self, trainer: pl.Trainer, step: int, healths: list[Health], ids: Any = None) -> None:
        """Log and judge what was read, and with `ids` also what a sampled pass over some of them finds."""
        assert self._health is not None
        if ids is not None and self._health.failed is None:
            healths = self._sample(step, ids, healths, trainer.loggers)
        if healths:
            for logger in trainer.loggers:
                logger.log_metrics(summary(healths), step=step)
            self._flags.judge(step, healths)

    def _sample(self, step: int, ids: Any, stored: list[Health], loggers: Sequence[Any]) -> list[Health]:
        assert self._health is not None
        found = self._health.sample(ids, stored)
        if self._health.failed is not None:
            log.warning("step %d: no memory for a sampled pass (%s); fp8.csv ends here, training goes on",
                        step, self._health.failed)  # fmt: skip
            return stored
        if self._write is not None and ranks.is_first_rank():
            self._write(step, found)
        for logger in loggers:
            if write := getattr(logger, "log_fp8_tensors", None):  # loggers.EventFile
                write(found, step)
        return found

    @contextmanager
    def _only_looking(self, step: int) -> Iterator[None]:
        """Go on training, without this callback, after an error in it: what only looks does not end a run."""
        try:
            yield
        except RunError:
            raise
        except Exception as error:
            self._health = None
            log.warning("step %d: FP8's health is not watched from here on (%s: %s); training goes on",
                        step, type(error).__name__, error)  # fmt: skip
