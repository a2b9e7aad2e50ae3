"""The LightningModule: what Lightning calls, around the plain-torch training step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import functional

from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.compat import lightning_private as loops
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.run_length import last_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.replicas import check_replicas
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8.resolve import Plan, plain_plan
from gpt2_fp8.fp8.scaling import Context
from gpt2_fp8.runtime import rng
from gpt2_fp8.runtime.sharding import Sharding
from gpt2_fp8.train import huggingface, resume, trained
from gpt2_fp8.train.language_model import check_shape
from gpt2_fp8.train.precision_plugin import RunPrecision
from gpt2_fp8.train.strategies import ShardedStrategy, own_part
from gpt2_fp8.train.trainer import check_trainer, write_folders


class GPT2Module(pl.LightningModule):
    """Adapts `TrainingStep` to Lightning, with manual optimization: a batch is a rank's share of one optimizer step.

    Batches are `{"ids": int32 [sequences, n_positions + 1], "cursor": ...}`; ids of -1 are padding. The data module is
    told of a batch (`advance(cursor)`) only after it was trained on. The configuration is the hyper-parameters.

    Args:
        config: the run's; its micro-batch is a number.
        vocab_size: the tokenizer's; None: as the configuration says.
        weights: what the model begins with; None: those of `init_from`, or initial values.
        step_state: what its training step begins with, such as FP8 scales.

    Attributes:
        step: the training step, from `configure_model` on.
        model: its model.
        val_loss: the newest validation loss, on the host; None before one.
    """

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int | None = None,
        weights: Mapping[str, Tensor] | None = None,
        step_state: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.config, self.vocab_size = config, vocab_size or vocabulary(config)
        self.val_loss: float | None = None
        if weights is None and config.init_from:
            weights = huggingface.read_weights(Path(config.init_from).expanduser(), config.model, self.vocab_size)
        self._weights = weights
        self._step_state = step_state or {}  # if there is no step yet
        self._random_states: list[Any] = []  # of every rank of a checkpoint, until training begins
        self.save_hyperparameters(trained.to_plain(config, self.vocab_size))

    # Building

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: Path | str,
        map_location: torch.device | str | None = None,
        hparams_file: object = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        config: RunConfig | None = None,
    ) -> GPT2Module:
        """Build the module of a checkpoint's folder, in float32 and plain torch until a Trainer has a precision plugin.

        Its weights are their average, if the checkpoint has one.
        `config` is for a checkpoint that does not hold its own; the others are Lightning's and change nothing.
        """
        found = trained.read(Path(checkpoint_path), map_location=map_location or "cpu", config=config)
        module = cls(found.config, weights=found.weights, step_state=found.step)
        device = torch.device(map_location or "cpu")
        with device:
            module._build(plain_plan(found.config, "cuda" if device.type == "cuda" else "cpu"))
        return module

    def configure_callbacks(self) -> list[pl.Callback]:
        """Refuse a Trainer that contradicts the configuration: this is what Lightning asks for first."""
        check_trainer(self.trainer, self.config)
        write_folders(self.trainer)
        loops.limit_steps(self.trainer, last_step(self.config))
        return []

    def configure_model(self) -> None:
        """Build the layers on the device that will run them, and fill them; layers that are there already stay."""
        precision = cast(RunPrecision, self.trainer.precision_plugin)
        plan = precision.plan
        if hasattr(self, "model"):
            if self.step.plan.computes_as(plan):
                self.step.on_settled.clear()  # of an earlier `fit`
                return
            self._weights = self.state_dict()
            self._step_state = self._step_state or self.step.state_dict()
        self._build(plan, precision.forward_context, getattr(self.trainer.strategy, "sharding", None))

    def _build(self, plan: Plan, forward_context: Context | None = None, sharding: Sharding | None = None) -> None:
        """Build the training step, and fill its model."""
        self.step = TrainingStep(
            self.config,
            plan,
            self.vocab_size,
            backward=self.manual_backward,
            no_sync=lambda: getattr(self.trainer.strategy, "block_backward_sync", ExitStack)(),
            forward_context=forward_context,
            sharding=sharding,
        )
        self.step.on_given_up = lambda: loops.uncount_step(self.trainer)
        self.model = self.step.model
        if self._weights is None:
            self.step.initialise()
        else:
            self.load_state_dict(self._weights)
            self._weights = None
        self.step.load_state_dict(self._step_state)

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its learning-rate schedule."""
        optimizer, schedule = self.step.prepare_optimizer()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def forward(self, ids: Tensor) -> Tensor:
        """Compute logits [sequences, tokens, vocab_size] of integer ids [sequences, tokens] (`logits`)."""
        self._check_built()
        return logits(self.step, ids, self.vocab_size)

    def _check_built(self) -> None:
        """Raise UserError if the module has no layers."""
        if not hasattr(self, "model"):
            remedy = "GPT2Module.load_from_checkpoint(FOLDER), or Trainer.fit or Trainer.validate before it"
            raise UserError.of("the module has no layers yet: a Trainer builds them", remedy)

    # Training

    def on_train_start(self) -> None:
        """Put the text and the random numbers where the checkpoint left them, or where a new run begins."""
        if begin := getattr(self.trainer.datamodule, "begin", None):  # type: ignore[attr-defined]  # it may be anyone's
            begin(self.trainer.global_step)
        rng.begin_rank(self._random_states, self.config.seed, self.trainer.global_step)
        self._step_state, self._random_states = {}, []  # from now on the step's own are newer
        self.step.attempts.ahead = not loops.hooks_into_backward(self.trainer)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute one optimizer step, and return this rank's loss on the device: see `TrainingStep.__call__`."""
        optimizer = cast(LightningOptimizer, self.optimizers())
        advance = self.trainer.datamodule.advance  # type: ignore[attr-defined]  # Lightning sets it in `fit`
        loss = self.step(batch["ids"], optimizer.step, partial(advance, batch["cursor"]))
        self._log_train_loss()
        return loss

    def _check_replicas(self) -> None:
        """Raise Drifted if ranks have different weights. Collective."""
        self.step.settle()
        check_replicas(self.model, self.trainer.global_step, self.step.average.state_dict().values())

    def _log_train_loss(self) -> None:
        """Log `train_loss`, unless Throughput does. Its readers, and those of the rate, need the step settled."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        is_logged = any(isinstance(callback, Throughput) for callback in callbacks)
        if not is_logged or any(isinstance(callback, LearningRateMonitor) for callback in callbacks):
            self.step.settle()
        if not is_logged:
            assert self.step.last is not None
            verdict = self.step.last.read()
            penalty = {} if verdict.penalty is None else {"penalty": verdict.penalty}
            self._log_row({"train_loss": verdict.loss} | penalty, self.trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def _log_row(self, metrics: Mapping[str, float], every_n_steps: int = 1) -> None:
        """Show metrics of a step to callbacks and the progress bar, and at intervals (0: never) to the loggers."""
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        for name in () if fitting else metrics:
            loops.return_only(self.trainer, name)
        loops.log_from_host(self, metrics, logger=not fitting)  # `Trainer.validate` returns these
        step = self.trainer.global_step
        for logger in self.trainer.loggers if every_n_steps and step % every_n_steps == 0 else ():
            # By ourselves: Lightning would count this step from 0.
            logger.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)

    def on_train_batch_end(self, *_: Any) -> None:
        """Make Lightning validate after the last step, whatever the interval."""
        if self.trainer.global_step >= self.trainer.max_steps:
            self.trainer.should_stop = True

    # Validation, test and predict

    def on_validation_epoch_start(self) -> None:
        """Start the sums of losses and of scored tokens, of each source and set. A sanity check leaves none."""
        data = getattr(self.trainer, "datamodule", None)  # it may be anyone's
        self._sources: list[str] = getattr(data, "val_sources", []) or [""]
        self._sets: list[str] = getattr(data, "val_sets", [])
        texts = len(self._sources) + len(self._sets)
        self._sums = [torch.zeros(2, dtype=torch.float64, device=self.device) for _ in range(texts)]
        if self.trainer.sanity_checking:
            self._undo_scales = self.step.scaling.trial()
        else:
            self._check_replicas()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the losses of one micro-batch of [sequences, n_positions + 1] to the sums of its source."""
        ids, source = batch["ids"], batch.get("source", 0)
        with torch.inference_mode(False), torch.no_grad():  # what a forward allocates may be trained with
            ids = ids.clone() if ids.is_inference() else ids
            self._sums[source] = self._sums[source] + self.step.evaluation.sums(ids)

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`, and `val_loss/NAME` of a mixture's sources and of `data.validation`."""
        if self.trainer.sanity_checking:
            self._undo_scales()
        else:
            self.val_loss = self._log_mean_loss("val_loss")

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_test_epoch_end(self) -> None:
        """Log `test_loss` as a validation logs `val_loss`."""
        self._log_mean_loss("test_loss")

    def _log_mean_loss(self, metric: str) -> float:
        """Log and return the mean over every token of all sources and ranks; log each text's too, as `metric`/NAME."""
        sums = self.trainer.strategy.reduce(torch.stack(self._sums), reduce_op="sum")
        of_sources, names = sums[: len(self._sources)], [*self._sources, *self._sets]
        # In float32, as Lightning keeps it beside the checkpoints.
        overall, *own = [(total / count).float().item() for total, count in (of_sources.sum(0), *sums)]
        losses = {f"{metric}/{name}": loss for name, loss in zip(names, own, strict=True) if name}
        self._log_row({metric: overall} | losses)
        return overall

    def predict_step(self, batch: Tensor | dict[str, Any], batch_idx: int) -> Tensor:
        """Compute logits [sequences, tokens, vocab_size] of ids [sequences, tokens], or of a validation's batch."""
        return self(batch if isinstance(batch, Tensor) else batch["ids"][:, :-1].clamp_min(0))

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict after the last step, with no prefix: anyone can read the file."""
        self._check_built()
        self.step.settle()
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights. Raises CheckpointError with what differs when they are another model's."""
        self._check_built()
        own = self.model.state_dict()
        state = {name: own_part(value, own.get(name)) for name, value in state_dict.items()}
        try:
            return self.model.load_state_dict(state, strict, assign)
        except RuntimeError as error:
            remedy = "use the model= and data.tokenizer= that it was trained with"
            reason = " ".join(str(error).split())  # torch's has a line for each kind of difference
            raise CheckpointError.of(f"the checkpoint does not fit the model: {reason}", remedy) from None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a run needs to continue: see `resume.add_state`. Raises Drifted."""
        self._check_replicas()
        resume.add_state(checkpoint, self.step)
        if isinstance(strategy := self.trainer.strategy, ShardedStrategy):
            checkpoint["training_step"] = strategy.whole(checkpoint["training_step"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what a run continues from: see `resume.take_state`, and what it raises.

        A Trainer that does not fit gets the weights that a run validates with: their average, if there is one.
        """
        if self.trainer.state.fn != TrainerFn.FITTING:
            checkpoint["training_step"], average = trained.split_average(checkpoint.get("training_step", {}))
            checkpoint["state_dict"] = average or checkpoint["state_dict"]
        self._random_states, self._step_state = resume.take_state(checkpoint, self.trainer, self.step), {}


def logits(step: TrainingStep, ids: Tensor, vocab_size: int) -> Tensor:
    """Compute logits [sequences, tokens, vocab_size] of integer ids [sequences, tokens], without gradients.

    They are computed in the precision of the run's validations, on the layers' device. Raises UserError for ids of
    another shape, for more tokens than positions, and for FP8 layers that have no scales yet.
    """
    n_positions = step.config.model.n_positions
    check_shape(ids, n_positions)
    tokens = ids.shape[1]
    in_fp8 = step.plan.fp8 and not step.plan.evaluates_in_bf16
    with step.evaluation.forwards() as model:
        if in_fp8 and not step.scaling.ready:
            raise UserError.of("the FP8 layers have no scales yet", "a training step or Trainer.validate finds them")
        if in_fp8:  # which takes multiples of 16; a causal model does not see what follows
            ids = functional.pad(ids, (0, n_positions - tokens))
        found: Tensor = model(ids.to(next(model.parameters()).device))
    return found[:, :tokens, :vocab_size]
