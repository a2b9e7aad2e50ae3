"""Lightning's loops and their counters, its `log`, its warnings. Holds for `lightning>=2.6.6,<2.7`.

Its counters are the only record of what a resumed run does next.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

# Wrong about our module and its data, in anyone's Trainer.
_WRONG: dict[str, type[Warning]] = {
    # Our loader is sized, reads in its own processes, and its position is in the data module's state.
    ".*does not have many workers.*": PossibleUserWarning,
    "Your `IterableDataset` has `__len__` defined.*": UserWarning,
    ".*your dataloader is not resumable.*": UserWarning,
    ".*recommended to use `self.log\\('(val|test)_loss.*": PossibleUserWarning,  # it is already the same on every rank
    "You called `self.log\\('(val|test)_loss.*but have no logger": UserWarning,  # the module did
    "Precision bf16-mixed is not supported by the model summary.*": UserWarning,  # its weights are float32
    "`max_epochs` was not set. Setting it to 1000 epochs.*": PossibleUserWarning,  # a run is one
}
# Of no use in a run, whose Trainer is ours.
_OF_RUN: dict[str, type[Warning]] = {
    # The last step of a run is always logged.
    "The number of training batches .* is smaller than the logging interval.*": PossibleUserWarning,
    "The `srun` command is available on your system but is not used.*": PossibleUserWarning,
    "GPU available but not used.*": PossibleUserWarning,  # trainer=cpu
    ".*isinstance\\(treespec, LeafSpec\\).*": FutureWarning,  # Lightning 2.6 on torch 2.11 and later
}


# ---- the loops' counters ---------------------------------------------------------------------------------------------


def resume_into_validation(fit_loop: dict[str, Any]) -> None:
    """Change a fit loop's saved state so that resuming begins with the whole validation of the saved step.

    Lightning 2.6 believes of a checkpoint from `on_train_batch_end`, or from the middle of a validation, that its
    validation is done. Only one state makes it validate first: "in the middle of the evaluation" after a finished
    training batch (`update_restart_stage` of both loops). So the counters are made to say this.
    """
    trained = fit_loop["epoch_loop.batch_progress"]
    for count in (trained["total"], trained["current"]):
        count["completed"] = count["processed"]
    validated = fit_loop["epoch_loop.val_loop.batch_progress"]
    for count in (validated["total"], validated["current"]):
        count.update(ready=1, started=1, processed=0, completed=0)
    validated["is_last_batch"] = False


def limit_steps(trainer: Any, max_steps: int) -> None:
    """Set the `max_steps` of a Trainer that was made without one. Its own attribute cannot be set."""
    if trainer.max_steps == -1:
        trainer.fit_loop.epoch_loop.max_steps = max_steps


def leave_signals_alone(trainer: Any) -> None:
    """Have a Trainer of several ranks not ask rank 0 before each step, by way of the GPU, whether a SIGTERM came."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def hooks_into_backward(trainer: Any) -> bool:
    """Return whether a callback of a Trainer, or its module, has a hook around a backward, as `LambdaCallback` may."""
    names = "on_before_backward", "on_after_backward"
    hooks = [getattr(it, name) for it in (*trainer.callbacks, trainer.lightning_module) for name in names]
    own = {getattr(base, name) for base in (pl.Callback, pl.LightningModule) for name in names}
    return any(getattr(hook, "__func__", hook) not in own for hook in hooks)


def is_last_step(trainer: Any) -> bool:
    """Return whether no step follows the one that the Trainer has counted last: by `max_steps`, or as it was told."""
    return trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step


def is_validation_due(trainer: Any) -> bool:
    """Return whether the last trained step must be validated; also in the middle of that validation."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    return fetcher is not None and loop._should_check_val_fx(fetcher)


def uncount_step(trainer: Any) -> None:
    """Remove the last counted step from the counters: its update was not made, and the step is given up."""
    loop = trainer.fit_loop.epoch_loop
    stepped = loop.manual_optimization.optim_step_progress
    for count in (stepped.total, stepped.current):
        count.ready = count.completed = count.completed - 1
    for count in (loop.batch_progress.total, loop.batch_progress.current):
        count.processed -= 1
        count.completed = min(count.completed, count.processed)


def set_back_to_last_step(trainer: Any) -> None:
    """Between two steps, set the counters back to the last hook of the step, or of its validation.

    They have moved since, perhaps to the next step, and decide whether a resumed run validates.
    """
    loop = trainer.fit_loop.epoch_loop
    counts = (loop.batch_progress.total, loop.batch_progress.current)
    if not counts[1].processed:
        return
    loop._batches_that_stepped = counts[0].processed - 1
    loop.batch_progress.is_last_batch = False  # the next one may be the last
    for count in counts:
        count.ready = count.started = count.processed
    if not is_validation_due(trainer):
        for count in counts:
            count.completed = count.processed - 1


# ---- logging ---------------------------------------------------------------------------------------------------------


def log_from_host(module: pl.LightningModule, metrics: Mapping[str, float], logger: bool) -> None:
    """Have a module log metrics as tensors on the CPU. `logger`: also for the loggers.

    `log` puts a float on the module's device, and a progress bar would wait for the GPU in every step.
    """
    for name, value in metrics.items():
        module.log(name, torch.tensor(value), prog_bar=True, logger=logger)


def log_last_step(trainer: pl.Trainer) -> None:
    """Send a step's metrics to the loggers, as Lightning does after `on_train_batch_end` unless that has raised."""
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()


def return_only(trainer: pl.Trainer, name: str) -> None:
    """Have `Trainer.validate` return the metric `name` without logging it: its step may be one too few."""
    connector = trainer._logger_connector
    log = type(connector).log_eval_end_metrics

    def log_others(metrics: dict[str, Any]) -> None:
        log(connector, {key: value for key, value in metrics.items() if key != name})

    connector.log_eval_end_metrics = log_others  # type: ignore[method-assign]


def detach_logging(trainer: pl.Trainer) -> None:
    """Remove the module's `log` and `log_dict` from the callbacks, which would keep it, and its weights, in memory."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for method in ("log", "log_dict"):
            vars(callback).pop(method, None)


# ---- the process -----------------------------------------------------------------------------------------------------


def ignore_warnings(whole_run: bool) -> None:
    """Hide warnings of Lightning that are no fault here, by their texts. `whole_run`: the Trainer is ours, too."""
    for message, category in (_WRONG | (_OF_RUN if whole_run else {})).items():
        warnings.filterwarnings("ignore", message=message, category=category)


def forks_or_spawns(launcher: object) -> bool:
    """Return whether a strategy's launcher trains in child processes, whose module the caller never sees."""
    return isinstance(launcher, _MultiProcessingLauncher)
