"""The LightningModule: what Lightning calls, around the plain-torch model and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gpt2_fp8.checkpoint.run_state import restoring
from gpt2_fp8.compat import lightning_loops as loops
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.engine import Engine
from gpt2_fp8.engine.micro_batching import Attempts
from gpt2_fp8.engine.optim import build_optimizer, build_schedule
from gpt2_fp8.engine.step import StepResult, Verdict, update
from gpt2_fp8.model.gpt2 import initialise
from gpt2_fp8.precision import state
from gpt2_fp8.precision.plugin import FP8Precision
from gpt2_fp8.precision.resolve import Plan
from gpt2_fp8.runtime import rng
from gpt2_fp8.runtime.signals import Interrupted
from gpt2_fp8.train import resume


class GPT2Module(pl.LightningModule):
    """GPT-2 under Lightning, with manual optimization: a batch is a rank's share of one optimizer step.

    Batches are `{"ids": int32 [sequences, n_positions + 1], "cursor": ...}`; ids of -1 are padding. The data module is
    told of a batch (`advance(cursor)`) only after it was trained on.

    A step ends late, in `finish_step`. `last_step` is the newest finished one's result, and callbacks with a method
    `on_step_finished(trainer, module)` are called then, in their order.
    """

    def __init__(self, config: RunConfig, plan: Plan, vocab_size: int, weights: Mapping[str, Tensor] | None = None):
        super().__init__()
        self.automatic_optimization = False
        self.config, self.plan, self.vocab_size = config, plan, vocab_size
        self.last_step: StepResult | None = None
        self.val_loss: float | None = None  # the newest, on the host
        self.micro_batch_asked: int | None = None  # where memory allows less
        self._weights = weights
        self._rng: list[Any] | None = None
        self._restored_from: Any = None  # the checkpoint that the run continues from
        self._validation = ExitStack()
        self._first_step = True
        self._rng_before: dict[str, Any] = {}  # the step that is not finished
        self._unfinished: tuple[dict[str, Any], StepResult] | None = None  # a batch and what its step was like

    # Building

    def configure_model(self) -> None:
        """Build the layers on the device that will run them, and fill them."""
        if hasattr(self, "model"):
            return
        self.engine = Engine(self.config, self.plan, self.vocab_size)
        self.model = self.engine.model
        self.attempts = Attempts(self.engine, self.manual_backward, self._no_sync, self.micro_batch_asked)
        if self._weights is None:
            initialise(self.model, self.config.seed)
        else:
            self.load_state_dict(self._weights)
            self._weights = None

    def configure_optimizers(self) -> Any:
        """Fused AdamW with warm-up and cosine decay."""
        optimizer = build_optimizer(self.model, self.config.optim)
        schedule = build_schedule(optimizer, self.config.optim, self.config.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # Training

    def on_train_start(self) -> None:
        """Put the random numbers where the checkpoint left them."""
        if self._rng is not None:
            with restoring(self._restored_from):
                rng.restore_rank(self._rng)
            self._rng = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """One optimizer step."""
        ids, plugin = batch["ids"], self.trainer.precision_plugin
        self._rng_before = rng.capture_torch()
        try:
            if self._first_step:
                self._prepare_scales(ids)
            optimizer = cast(LightningOptimizer, self.optimizers())
            loss = self.attempts.gradients(ids, plugin.forward_context)
        except Interrupted:  # the step is given up
            rng.restore_torch(self._rng_before)
            raise
        absurd = self.engine.absurd_magnitudes()
        self._unfinished = batch, self._update(optimizer.optimizer, optimizer.step, loss, absurd)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        """The next batch is here: now the host may wait."""
        self.finish_step()

    def finish_step(self) -> None:
        """What is left to do of a step once the host knows whether its update was made: run it again in bf16 where
        not, keep magnitudes that have jumped from becoming scales, move on the schedule and the data, tell the
        callbacks. Nothing where it is done.

        Before the next step the host has to wait for that, and the GPU has only the update left to do meanwhile. So
        what the host can do without knowing comes before it: Lightning's own work between steps, and the next batch.
        Whatever looks at the run's state calls this first, on all ranks at the same place: the log, a validation, a
        checkpoint. Raises what callbacks raise: a run may have to go back.
        """
        if self._unfinished is None:
            return
        batch, result = self._unfinished
        verdict, plugin = result.read(), self.trainer.precision_plugin
        if verdict.skipped and isinstance(plugin, FP8Precision):
            try:
                result = self._run_again_in_bf16(batch["ids"], plugin, verdict)
            except Interrupted:  # so is this one, which has changed no weight and is counted
                self._unfinished = None
                rng.restore_torch(self._rng_before)
                loops.uncount_step(self.trainer)
                raise
        elif verdict.absurd:
            self.engine.limit_magnitudes()
        self._unfinished, self.last_step = None, result
        cast(LRScheduler, self.lr_schedulers()).step()
        self.trainer.datamodule.advance(batch["cursor"])  # type: ignore[attr-defined]  # Lightning sets it in `fit`
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if told := getattr(callback, "on_step_finished", None):
                told(self.trainer, self)

    def _run_again_in_bf16(self, ids: Tensor, plugin: FP8Precision, first: Verdict) -> StepResult:
        """The step once more, from the same weights: its update was left out. All ranks come here, or none."""
        self.engine.undo_scales()
        with torch.enable_grad():  # Lightning has switched gradients off where it is about to validate
            loss = self.attempts.gradients_in_bf16(ids, plugin.bf16_context)
        # Not through Lightning, which counts its optimizer's steps: this one is counted.
        optimizer = cast(LightningOptimizer, self.optimizers()).optimizer
        return replace(self._update(optimizer, optimizer.step, loss), first=first)

    def _update(
        self, optimizer: Optimizer, apply: Callable[[], object], loss: Tensor, absurd: Tensor | None = None
    ) -> StepResult:
        return update(optimizer, apply, self.engine.parameters, loss, self.config.optim.max_grad_norm, absurd)

    def _no_sync(self) -> Any:
        return getattr(self.trainer.strategy, "block_backward_sync", ExitStack)()

    def _prepare_scales(self, ids: Tensor) -> None:
        """Delayed scaling needs scales before the first forward that counts, in training or in a validation that was
        still due: the checkpoint's, or a calibration's on `ids`."""
        self._first_step = False
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, FP8Precision) and plugin.scaling is not None:
            with restoring(self._restored_from):
                found = plugin.restore_scales()
            if not found:
                self.attempts.calibrate(ids, plugin.forward_context)
                plugin.scales_found = True

    def on_train_batch_end(self, *_: Any) -> None:
        """Make Lightning validate after the last step, whatever the interval."""
        if self.trainer.global_step >= self.trainer.max_steps:
            self.trainer.should_stop = True

    # Validation

    def on_validation_model_eval(self) -> None:
        """Lightning's first call before a validation: of the weights that the last step has led to."""
        self.finish_step()
        super().on_validation_model_eval()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """For one forward outside of Lightning's loops: evaluation mode, no gradients, the run's precision, and
        delayed scaling's history left as it was."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), state.unchanged(self.model), self.trainer.precision_plugin.forward_context():
                yield
        finally:
            self.model.train(training)

    def on_validation_epoch_start(self) -> None:
        """Start the sums; keep the scaling history, once there is one."""
        if not self._first_step:
            self._validation.enter_context(state.unchanged(self.model))
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add one micro-batch of [sequences, n_positions + 1] to the sums."""
        if self._first_step:
            self._prepare_scales(batch["ids"])
            self._validation.enter_context(state.unchanged(self.model))
        self._sums += self.attempts.evaluate(batch["ids"])

    def leave_validation(self) -> None:
        """Put delayed scaling's history back as it was before the validation, if there is one under way: what is saved
        now is training's."""
        self._validation.close()

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`: the mean over every scored token of every rank."""
        self.leave_validation()
        total, count = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.val_loss = val_loss = (total / count).float().item()  # as Lightning keeps it beside the checkpoints
        self.log("val_loss", val_loss, prog_bar=True, logger=False)
        for logger in self.trainer.loggers:  # by ourselves: Lightning would count this step from 0
            logger.log_metrics({"val_loss": val_loss}, step=self.trainer.global_step)

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own, with no prefix: anyone can read the file."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights. Raises UserError listing what differs when they are another model's."""
        resume.refuse_other_weights(self.model.state_dict(), state_dict)
        return self.model.load_state_dict(state_dict, strict, assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's random numbers, and what the run computed in."""
        checkpoint["rng"] = rng.gather()
        checkpoint["model"] = asdict(self.config.model)
        checkpoint["micro_batch_size"] = self.attempts.state_dict()
        recipe = self.config.recipe.name if self.plan.fp8 else None
        precision = {"asked": self.plan.asked, "ran": self.plan.ran, "recipe": recipe, "reason": self.plan.reason}
        checkpoint["precision"] = precision | {"fell_back": self.plan.fell_back}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the random numbers; let the configuration, not the checkpoint, say the optimizer's settings.

        Raises UserError where the checkpoint is another model's, or of other text, with every difference.
        """
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # whose tokenizer gives the weights' shapes
        resume.refuse([*resume.other_settings(self.config.model, checkpoint.get("model", {})),
                       *datamodule.other_settings(checkpoint["TokenDataModule"])])  # fmt: skip
        rng.check(checkpoint["rng"])
        self._rng, self._restored_from = checkpoint["rng"], self.trainer.ckpt_path
        if sizes := checkpoint.get("micro_batch_size"):  # not in checkpoints of format 1
            self.attempts.load_state_dict(sizes)
        resume.keep_own_settings(checkpoint, self.model, self.config.optim, self.config.trainer.max_steps)
