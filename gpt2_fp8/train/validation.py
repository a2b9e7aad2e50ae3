"""What a module computes without training: losses of a validation, by source, and logits; how metrics are logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import functional

from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.compat import lightning_private
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.engine.training_step import TrainingStep


class MetricLog:
    """Logs a module's metrics under their steps, and settles a step early only if someone reads it."""

    def __init__(self, module: pl.LightningModule):
        self.module, self.trainer = module, module.trainer
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        self._has_train_loss = any(isinstance(callback, Throughput) for callback in callbacks)
        self._has_rates = any(isinstance(callback, LearningRateMonitor) for callback in callbacks)

    def step_ended(self, step: TrainingStep) -> None:
        """Log `train_loss`, unless Throughput does. Its readers, and those of the rate, need the step settled."""
        if self._has_rates or not self._has_train_loss:
            step.settle()
        if not self._has_train_loss:
            assert step.last is not None
            verdict = step.last.read()
            penalty = {} if verdict.penalty is None else {"penalty": verdict.penalty}
            every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
            self.log_row({"train_loss": verdict.loss} | penalty, every)

    def log_row(self, metrics: Mapping[str, float], every_n_steps: int = 1) -> None:
        """Show metrics of a step to callbacks and the progress bar, and at intervals (0: never) to the loggers."""
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        for name in () if fitting else metrics:
            lightning_private.return_only(self.trainer, name)
        lightning_private.log_from_host(self.module, metrics, logger=not fitting)  # `Trainer.validate` returns these
        step = self.trainer.global_step
        for logger in self.trainer.loggers if every_n_steps and step % every_n_steps == 0 else ():
            # By ourselves: Lightning would count this step from 0.
            logger.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)


class Validation:
    """Sums the losses of a validation, logged as `metric`. A sanity check leaves nothing behind."""

    def __init__(self, module: Any, metric: str = "val_loss"):
        self.module, self.trainer, self.metric = module, module.trainer, metric
        # Sources of a mixture whose losses are told apart; the data module may be anyone's.
        self._names: list[str] = getattr(getattr(self.trainer, "datamodule", None), "val_sources", [])
        sources = max(1, len(self._names))
        self._sums = [torch.zeros(2, dtype=torch.float64, device=module.device) for _ in range(sources)]
        if self.trainer.sanity_checking:
            self._undo_scales = module.step.scaling.trial()

    def add(self, ids: Tensor, source: int) -> None:
        """Add the losses of one micro-batch, ids [sequences, n_positions + 1], to the sums of its source."""
        with torch.inference_mode(False), torch.no_grad():  # what a forward allocates may be trained with
            ids = ids.clone() if ids.is_inference() else ids
            self._sums[source] = self._sums[source] + self.module.step.evaluation.sums(ids)

    def end(self) -> None:
        """Log the mean over every scored token of every rank, and of a mixture each source's, as `val_loss/NAME`."""
        if self.trainer.sanity_checking:
            self._undo_scales()
            return
        sums = self.trainer.strategy.reduce(torch.stack(self._sums), reduce_op="sum")
        # In float32, as Lightning keeps it beside the checkpoints.
        overall, *own = [(total / count).float().item() for total, count in (sums.sum(0), *sums)]
        if self.metric == "val_loss":
            self.module.val_loss = overall
        losses = {f"{self.metric}/{name}": loss for name, loss in zip(self._names, own, strict=False)}
        MetricLog(self.module).log_row({self.metric: overall} | losses)


def logits(step: TrainingStep, ids: Tensor, vocab_size: int) -> Tensor:
    """Compute logits [sequences, tokens, vocab_size] of integer ids [sequences, tokens], without gradients.

    They are computed in the precision of the run's validations, on the layers' device. Raises UserError for ids of
    another shape, for more tokens than positions, and for FP8 layers that have no scales yet.
    """
    if ids.dim() != 2:
        remedy = "ids[None] of one sequence" if ids.dim() == 1 else "ids of shape [sequences, tokens]"
        raise UserError.of(f"ids have the shape {list(ids.shape)}, and the model takes [sequences, tokens]", remedy)
    tokens, n_positions = ids.shape[1], step.config.model.n_positions
    if tokens > n_positions:
        raise UserError.of(f"{tokens} tokens, and the model has {n_positions} positions", f"ids[:, -{n_positions}:]")
    in_fp8 = step.plan.fp8 and not step.plan.evaluates_in_bf16
    with step.evaluation.forwards() as model:
        if in_fp8 and not step.scaling.ready:
            raise UserError.of("the FP8 layers have no scales yet", "a training step or Trainer.validate finds them")
        if in_fp8:  # which takes multiples of 16; a causal model does not see what follows
            ids = functional.pad(ids, (0, n_positions - tokens))
        found: Tensor = model(ids)
    return found[:, :tokens, :vocab_size]
