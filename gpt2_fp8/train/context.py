"""The end of a run of any kind. It keeps what that end needs to know, from the start of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.divergence import DivergenceGuard
from gpt2_fp8.callbacks.log_line import LogLine
from gpt2_fp8.callbacks.time_limit import TimeLimit
from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.compat.lightning_process import rank
from gpt2_fp8.config import run_length
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.own_words import Typed, going_on
from gpt2_fp8.config.schema import PlainPrecisionConfig, RunConfig
from gpt2_fp8.engine.pace import Pace
from gpt2_fp8.kernels import libraries
from gpt2_fp8.runtime import collectives, host_memory, rendezvous
from gpt2_fp8.train import last_words
from gpt2_fp8.train.build import Parts
from gpt2_fp8.train.process import clean_up
from gpt2_fp8.train.summary import DivergenceReport, Precision, Summary


def validation_missing(parts: Parts, checkpointing: Checkpointing) -> bool:
    """Return whether the process before this one ended between the last step and its validation."""
    if parts.trainer.limit_val_batches == 0 or parts.trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False
    return checkpointing.validations.step != parts.trainer.global_step


def last_val_loss(parts: Parts, checkpointing: Checkpointing) -> float | None:
    """Return the newest validation loss, or None if there was no validation."""
    if parts.module.val_loss is None and (last := pointers.read(checkpointing.folder, "last")):
        return last.val_loss
    return parts.module.val_loss


def fill(summary: Summary, parts: Parts, divergence: DivergenceGuard, checkpointing: Checkpointing) -> None:
    """Write a run's results into its summary, at any moment, also after a failure."""
    trainer, throughput, best = parts.trainer, parts.throughput, checkpointing.best
    summary.precision.ran, summary.precision.reason = parts.plan.ran, parts.plan.reason
    summary.recipe = parts.plan.recipe
    summary.steps = trainer.global_step
    if (step := getattr(parts.module, "step", None)) is not None:
        summary.precision.last_in_bf16 = step.attempts.last_in_bf16
    summary.tokens = trainer.global_step * throughput.tokens_per_step
    summary.last_train_loss, summary.last_val_loss = throughput.train_loss, last_val_loss(parts, checkpointing)
    summary.tokens_per_second = throughput.median_rate
    summary.checkpoint_stall_seconds = checkpointing.stall.longest
    summary.divergence, summary.skipped_steps = (
        DivergenceReport(**divergence.policy.report()),
        divergence.policy.skipped,
    )
    if best is not None:
        summary.best_val_loss, summary.best_val_loss_step = best.val_loss, best.step
        summary.checkpoint.best = str(checkpointing.folder / best.checkpoint)
    if last := pointers.read(checkpointing.folder, "last"):
        summary.checkpoint.last = str(checkpointing.folder / last.checkpoint)
    summary.data = parts.data.report()
    summary.kernels = parts.kernels.found
    if parts.plan.device == "cpu":
        summary.device, summary.peak_memory_gb = "cpu", host_memory.peak_gb()
    else:
        summary.versions |= libraries.versions()
        summary.device = torch.cuda.get_device_name()
        summary.peak_memory_gb = max(summary.peak_memory_gb or 0.0, parts.memory.peak_gb or 0.0)
        summary.training_memory_gb = parts.memory.training_gb
        summary.validation_memory_gb = parts.memory.validation_gb or summary.validation_memory_gb


log = logging.getLogger(__name__)


class RunContext:
    """Ends a run in `folder`: its summary, its other ranks, and what it has changed in this process.

    Attributes: `checkpointing`, `divergence` and `time_limit` are the callbacks that outlive a rollback.
    `parts` are those of the present `fit`; None if there are none.
    """

    def __init__(self, config: RunConfig, folder: Path, words: Sequence[str] = (), typed: Typed | None = None) -> None:
        self.folder, self._config, self._typed, self._first_step = folder, config, typed, 0
        self.checkpointing = Checkpointing.from_config(folder / "checkpoints", config.callbacks)
        penalties = [f"penalty.{name}={weight:g}" for name, weight in asdict(config.penalty).items() if weight]
        folder = self.checkpointing.folder
        self.divergence = DivergenceGuard(config.callbacks, self.checkpointing.save, penalties, folder)
        limit = config.trainer.max_time
        self.time_limit = TimeLimit(None if limit is None else run_length.seconds(limit))
        if (met := rendezvous.joined()) is not None:
            collectives.record_flights(folder)
            met.watch(self._write_lost)
        self.parts: Parts | None = None
        precision = Precision(asked=config.precision.name)
        self._summary = Summary(
            precision=precision, recipe=_recipe(config), optimizer=config.optimizer.name, tags=config.tags,
            notes=config.notes, overrides=list(words), config=asdict(config),
        )  # fmt: skip

    def log_line(self, config: RunConfig, first_step: int) -> LogLine:
        """Build what writes the log's lines, for a run of these final settings that continues from `first_step`."""
        self._first_step = first_step
        pace = Pace(run_length.steps_to_run(config), self.time_limit.left)
        return LogLine(config, pace, self._best)

    def _best(self) -> tuple[float, int] | None:
        best = self.checkpointing.best
        return None if best is None or best.val_loss is None else (best.val_loss, best.step)

    def chosen(self, config: RunConfig) -> None:
        """Note the final settings."""
        self._summary.recipe, self._summary.config = _recipe(config), asdict(config)

    def ended(self, limit: str | None) -> None:
        """Note which limit has ended the run: the key of the last step's, or None before that step."""
        self._summary.ended_by = limit or ("trainer.max_time" if self.time_limit.reached else None)

    def built(self, parts: Parts) -> Parts:
        """Note the parts of a `fit` that is about to begin, and return them."""
        self.parts = parts
        return parts

    def rolled_back(self) -> None:
        """Note the result of the last `fit`, and drop its parts: their memory is needed. The caller keeps none."""
        self._fill()
        self.parts = None
        clean_up()

    def close(self, error: BaseException | None) -> None:
        """End the run, with `error` or well. Call it once, in any case."""
        if self.parts is not None:
            self.parts.data.say_documents()
            self.parts.data.teardown()  # Lightning does not call it if `fit` raises
            with nullcontext() if error is None else suppress(Exception):  # a GPU that has failed does not answer
                self._fill()
        if isinstance(error, RunError):
            self._tell(error)
        self._summary.finish(error)
        begun = self._summary.steps > self._first_step
        refused = isinstance(error, UserError) and not begun and pointers.steps(self.checkpointing.folder)
        if rank() == 0 and not refused:  # a refused command line does not replace the summary of an earlier run
            self._summary.take_over(self.folder)
            self._write()
        rendezvous.ending()
        clean_up()

    def _tell(self, error: RunError) -> None:
        """Add to an error how the run goes on."""
        here = self._typed.here if self._typed else Path.cwd()
        saved = bool(pointers.steps(self.checkpointing.folder))
        error.tell(going_on(self.folder, here, saved, in_sweep=self._typed is None and bool(self._summary.overrides)))

    def _write_lost(self, lost: RunError) -> None:
        """Write the summary of a run whose main thread hangs in a collective."""
        self._tell(lost)
        self._fill()
        self._summary.finish(lost)
        if rank() == 0:
            self._write()

    def _write(self) -> None:
        try:
            self._summary.write(self.folder)
        except OSError as error:  # a full disk: the run's end and exit code stay what they are
            log.error("%s; the summary cannot be written: %s", self._summary.status, error)
            return
        for line in last_words.lines(self._summary, self._config, self.folder, self._typed, self._first_step):
            log.info(line)

    def _fill(self) -> None:
        if (parts := self.parts) is not None:  # a thread reads it too
            fill(self._summary, parts, self.divergence, self.checkpointing)


def _recipe(config: RunConfig) -> str | None:
    return None if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name
