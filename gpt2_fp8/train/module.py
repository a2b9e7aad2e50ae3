"""The LightningModule: what Lightning calls, around the plain-torch training step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from gpt2_fp8.checkpoint.run_state import restoring
from gpt2_fp8.compat import lightning_loops as loops
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.runtime import rng
from gpt2_fp8.train import resume


class GPT2Module(pl.LightningModule):
    """Adapts `TrainingStep` to Lightning, with manual optimization: a batch is a rank's share of one optimizer step.

    Batches are `{"ids": int32 [sequences, n_positions + 1], "cursor": ...}`; ids of -1 are padding. The data module is
    told of a batch (`advance(cursor)`) only after it was trained on.

    Attributes:
        step: the training step, from `configure_model` on.
        model: its model.
        val_loss: the newest validation loss, on the host; None before one.
        asked_micro_batch_size: the settings' own, where memory allows less.
    """

    def __init__(self, config: RunConfig, vocab_size: int, weights: Mapping[str, Tensor] | None = None):
        super().__init__()
        self.automatic_optimization = False
        self.config, self.vocab_size = config, vocab_size
        self.val_loss: float | None = None
        self.asked_micro_batch_size: int | None = None
        self._weights = weights
        self._rng: list[Any] | None = None
        self._restored_from: Any = None  # the checkpoint that the run continues from

    # Building

    def configure_model(self) -> None:
        """Build the layers on the device that will run them, and fill them."""
        if hasattr(self, "model"):
            return
        self.step = TrainingStep(
            self.config,
            self.trainer.precision_plugin.plan,  # type: ignore[attr-defined]  # FP8Precision
            self.vocab_size,
            backward=self.manual_backward,
            no_sync=lambda: getattr(self.trainer.strategy, "block_backward_sync", ExitStack)(),
            asked_micro_batch_size=self.asked_micro_batch_size,
        )
        self.step.on_given_up = lambda: loops.uncount_step(self.trainer)
        self.step.restoring = lambda: restoring(self._restored_from)
        self.model = self.step.model
        if self._weights is None:
            self.step.initialise()
        else:
            self.load_state_dict(self._weights)
            self._weights = None

    def configure_optimizers(self) -> Any:
        """Return fused AdamW with warm-up and cosine decay."""
        optimizer, schedule = self.step.prepare_optimizer()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # Training

    def on_train_start(self) -> None:
        """Put the random numbers where the checkpoint left them."""
        if self._rng is not None:
            with restoring(self._restored_from):
                rng.restore_rank(self._rng)
            self._rng = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Compute one optimizer step."""
        optimizer = cast(LightningOptimizer, self.optimizers())
        advance = self.trainer.datamodule.advance  # type: ignore[attr-defined]  # Lightning sets it in `fit`
        self.step(batch["ids"], optimizer.step, partial(advance, batch["cursor"]))

    def on_train_batch_end(self, *_: Any) -> None:
        """Make Lightning validate after the last step, whatever the interval."""
        if self.trainer.global_step >= self.trainer.max_steps:
            self.trainer.should_stop = True

    # Validation

    def on_validation_epoch_start(self) -> None:
        """Start the sums."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add one micro-batch of [sequences, n_positions + 1] to the sums."""
        self._sums += self.step.evaluate(batch["ids"])

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`: the mean over every scored token of every rank."""
        total, count = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.val_loss = val_loss = (total / count).float().item()  # as Lightning keeps it beside the checkpoints
        self.log("val_loss", val_loss, prog_bar=True, logger=False)
        for logger in self.trainer.loggers:  # by ourselves: Lightning would count this step from 0
            logger.log_metrics({"val_loss": val_loss}, step=self.trainer.global_step)

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict after the last step, with no prefix: anyone can read the file."""
        self.step.settle()
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights. Raises UserError listing what differs when they are another model's."""
        resume.refuse_other_weights(self.model.state_dict(), state_dict)
        return self.model.load_state_dict(state_dict, strict, assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's random numbers, what a step begins with, and what the run computed in."""
        checkpoint["rng"] = rng.gather()
        checkpoint["model"] = asdict(self.config.model)
        checkpoint["training_step"] = self.step.state_dict()
        plan = self.step.plan
        checkpoint["precision"] = {
            "asked": plan.asked, "ran": plan.ran, "recipe": plan.recipe, "reason": plan.reason,
            "fell_back": plan.fell_back,
        }  # fmt: skip

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the random numbers; let the configuration, not the checkpoint, say the optimizer's settings.

        Raises UserError where the checkpoint is another model's, or of other text, with every difference.
        """
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # whose tokenizer gives the weights' shapes
        resume.refuse([*resume.other_settings(self.config.model, checkpoint.get("model", {})),
                       *datamodule.other_settings(checkpoint["TokenDataModule"])])  # fmt: skip
        rng.check(checkpoint["rng"])
        self._rng, self._restored_from = checkpoint["rng"], self.trainer.ckpt_path
        self.step.load_state_dict(checkpoint.get("training_step", {}))
        resume.keep_own_settings(checkpoint, self.model, self.config.optim, self.config.trainer.max_steps)
