"""The training log: loss, rate, gradient, speed, waiting and memory, a row an interval."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from gpt2_fp8.compat import lightning_private as loops
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.divergence import DivergencePolicy
from gpt2_fp8.engine.step import StepResult, Verdict
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import flops_per_token, peak_bf16_flops
from gpt2_fp8.runtime import collectives, devices, signals
from gpt2_fp8.runtime.moments import Moment


class Throughput(pl.Callback):
    """Logs every `trainer.log_every_n_steps` steps, once they are settled, to the loggers and to its readers.

    A step is settled while the GPU computes the next one, if that can be: so a row of the log takes no time of it. The
    first row, that of a step which is validated, and the last one are there at the end of their step.

    `docs/output.md` has the metrics. The time is that of the device, from verdict to verdict. It leaves out validation,
    sampling and the first step (compilation, calibration).

    Attributes:
        readers: functions called with each logged step and its metrics, on every rank.
        training_gb, validation_gb: peaks of allocated memory so far, GiB; None on a CPU, or before the first. Of a
            validation, with what training keeps meanwhile: weights, optimizer state, recorded graphs.
    """

    def __init__(self, config: RunConfig, vocab_size: int, policy: DivergencePolicy):
        self.every_n_steps = config.trainer.log_every_n_steps
        self.tokens_per_step = tokens_a_step(config)
        self.flops_per_token = flops_per_token(config.model, padded_vocabulary(vocab_size))
        self.rates: list[float] = []  # tokens per second of every interval
        self.readers: list[Callable[[int, Mapping[str, float]], object]] = []
        self.train_loss: float | None = None
        self.policy = policy  # which counts, before a row is written
        self._since: Moment | None = None  # where the interval has begun, or goes on; None before the first, or paused
        self._newest: Moment | None = None  # the verdict on the last step
        self._paused = False
        self._waits: deque[float] = deque()  # for the batch of each step that is not settled, s
        self._fetched = 0.0  # how long batches have taken in all, s
        self.training_gb: float | None = None
        self.validation_gb: float | None = None
        self._begin_interval()
        self._shown: dict[str, float] = {}  # of the newest row, until callbacks have it

    @property
    def median_rate(self) -> float | None:
        """Return tokens per second: the median over the run's intervals, or None before the first."""
        return statistics.median(self.rates) if self.rates else None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Subscribe to each settled step."""
        pl_module.step.on_settled.append(partial(self._on_settled, trainer))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset the interval. After this, Lightning restores what a checkpoint has of it."""
        self._since, self._paused, self._shown = None, False, {}
        self._waits.clear()
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._steps = self._kept = 0
        self._sums = torch.zeros(2)  # of losses and of penalties, on the host
        self._waited = self._seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note how long the batch has taken. After a validation and its samples, let the clock go on from before it."""
        before, self._fetched = self._fetched, trainer.datamodule.wait_seconds  # type: ignore[attr-defined]
        self._waits.append(self._fetched - before)
        if self._paused:
            self._since, self._paused = Moment(trainer.strategy.root_device), False
            self._seconds += self._waits[-1]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Settle a step whose row cannot wait for the next step, and give callbacks the newest row."""
        at_once = self._since is None or loops.is_last_step(trainer) or loops.is_validation_due(trainer)
        if at_once or (self._is_due(trainer) and not pl_module.step.settles_while_computing):
            pl_module.step.settle()
        loops.log_from_host(pl_module, self._shown, logger=False)
        self._shown = {}

    def _is_due(self, trainer: pl.Trainer) -> bool:
        """Return whether the step that the Trainer has counted last has a row."""
        return trainer.global_step % self.every_n_steps == 0 or loops.is_last_step(trainer) or self._since is None

    def _on_settled(self, trainer: pl.Trainer, result: StepResult) -> None:
        """Add a settled step to the interval, and log at its end."""
        verdict, self._newest = result.read(), result.sent.arrival
        wait = self._waits.popleft()
        self._waited += 0.0 if result.gap is None else min(wait, result.gap.seconds())
        self._steps += 1
        if not verdict.skipped:
            self._kept += 1
            self._sums += torch.tensor([verdict.loss, verdict.penalty or 0.0])
        if self._is_due(trainer):
            self._log(trainer, verdict, result.lr)

    def _log(self, trainer: pl.Trainer, verdict: Verdict, lr: float) -> None:
        metrics = self._metrics(trainer, verdict, lr)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        for reader in self.readers:
            reader(trainer.global_step, metrics)
        self._shown = {key: value for key, value in metrics.items() if key in ("train_loss", "tokens_per_second")}

    def _metrics(self, trainer: pl.Trainer, verdict: Verdict, lr: float) -> dict[str, float]:
        self.train_loss, penalty = (total / self._kept if self._kept else math.nan for total in self._sums.tolist())
        metrics = {
            "train_loss": self.train_loss,
            **({} if verdict.penalty is None else {"penalty": penalty}),
            "lr": lr,
            "grad_norm": verdict.grad_norm,
            "clip_ratio": verdict.clip_ratio,
            "skipped_steps": self.policy.skipped,
            "bf16_reruns": self.policy.reruns,
            "tokens": trainer.global_step * self.tokens_per_step,
            **getattr(trainer.datamodule, "source_metrics", dict)(),  # type: ignore[attr-defined]
        }
        assert self._newest is not None
        if self._since is not None:
            metrics |= self._speed(trainer, self._seconds + self._newest.seconds_since(self._since))
        self._since = self._newest
        self._begin_interval()
        return metrics

    def _speed(self, trainer: pl.Trainer, seconds: float) -> dict[str, float]:
        rate = self._steps * self.tokens_per_step / seconds
        self.rates.append(rate)
        metrics = {"tokens_per_second": rate, "step_time": seconds / self._steps, "data_wait": self._waited / seconds}
        if trainer.strategy.root_device.type == "cuda":
            peak = peak_bf16_flops(torch.cuda.get_device_name())
            if peak is not None:
                metrics["mfu_bf16"] = rate / trainer.world_size * self.flops_per_token / peak
            self.training_gb = peak_gb(self.training_gb)
            metrics["memory_gb"] = self.training_gb or 0.0
            metrics |= devices.read_gpu_meter() if trainer.is_global_zero else {}
        else:
            metrics["memory_gb"] = devices.peak_host_gb()
        return metrics

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Stop the clock after the last step, and begin a new peak of memory."""
        pl_module.step.settle()
        self.training_gb = peak_gb(self.training_gb, reset=True)
        if self._since is not None and self._newest is not None:
            self._seconds += self._newest.seconds_since(self._since)
            self._since, self._paused = None, True

    def on_validation_end(self, *_: Any) -> None:
        """Take the peak since its start as a validation's."""
        self.validation_gb = peak_gb(self.validation_gb, reset=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next row's losses are means of."""
        return {"kept": self._kept, "sums": self._sums.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the interval where the checkpoint left it."""
        self._kept, self._sums = state_dict["kept"], torch.tensor(state_dict["sums"])

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the row of the last step, if it can be settled by one rank. `GracefulStop` sees to signals."""
        if not collectives.is_distributed() and not signals.is_pending():
            with suppress(Exception):  # what has ended the run is said already
                pl_module.step.settle()


def peak_gb(before: float | None, reset: bool = False) -> float | None:
    """Return the larger of a peak `before` and that of the GPU's memory so far, GiB; `before` on a CPU."""
    if not torch.cuda.is_initialized():
        return before
    peak = max(before or 0.0, torch.cuda.max_memory_allocated() / 2**30)
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return peak
