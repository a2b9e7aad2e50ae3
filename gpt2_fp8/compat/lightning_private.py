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

_WARNINGS: dict[str, type[Warning]] = {
    # Our loader is sized, reads in its own worker processes, and its position is in the data module's state. Lightning
    # cannot see any of the three.
    ".*does not have many workers.*": PossibleUserWarning,
    "Your `IterableDataset` has `__len__` defined.*": UserWarning,
    ".*your dataloader is not resumable.*": UserWarning,
    # The last step of a run is always logged.
    "The number of training batches .* is smaller than the logging interval.*": PossibleUserWarning,
    ".*recommended to use `self.log\\('val_loss'.*": PossibleUserWarning,  # it is already the same on every rank
    # What else is on the machine says nothing about what was asked for. Under `srun` the ranks are its own.
    "The `srun` command is available on your system but is not used.*": PossibleUserWarning,
    "GPU available but not used.*": PossibleUserWarning,  # trainer=cpu
    ".*isinstance\\(treespec, LeafSpec\\).*": FutureWarning,  # Lightning 2.6 on torch 2.11 and later
}


# ---- the loops' counters ---------------------------------------------------------------------------------------------


def resume_into_validation(fit_loop: dict[str, Any]) -> None:
    """Change a fit loop's saved state so that resuming begins with the whole validation of the saved step.

    Lightning 2.6 believes of a checkpoint from `on_train_batch_end`, or from the middle of a validation, that its
    validation is done. It trains on: `_TrainingEpochLoop.advance` fast-forwards the counters.

    Only one state makes it validate first: "in the middle of the evaluation" (`_EvaluationLoop.update_restart_stage`)
    after a finished training batch (`_TrainingEpochLoop.update_restart_stage`). So the counters are made to say this.
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
    """Have a Trainer of several ranks not ask rank 0 before each step whether a SIGTERM came.

    It reads the answer from the GPU, which then has nothing to do until the next step is launched.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def hooks_into_backward(trainer: Any) -> bool:
    """Return whether a callback of a Trainer, or its module, has a hook around a backward.

    A step's backward may run before Lightning has counted the step before it. `LambdaCallback` has its hooks in the
    instance.
    """
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

    They have moved since: to a step that is complete, and perhaps to the next one, ready or started. They decide
    whether a resumed run validates.
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
    """Have a module log metrics, for callbacks and progress bars, as tensors on the CPU.

    `log` puts a float on the module's device. After each batch Lightning reads what a progress bar may show, until
    there is a newer value: the host would wait for the GPU in every step. `logger`: also for the loggers.
    """
    for name, value in metrics.items():
        module.log(name, torch.tensor(value), prog_bar=True, logger=logger)


def log_last_step(trainer: pl.Trainer) -> None:
    """Send the metrics of the step that has just ended to the loggers.

    Lightning does so after `on_train_batch_end`. An exception in that hook skips it, and a resumed run will not do it.
    """
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()


def return_only(trainer: pl.Trainer, name: str) -> None:
    """Have `Trainer.validate` return the metric `name` without handing it to the loggers.

    It returns what it logs, and logs it with an epoch, at a step that may be one less than the steps done.
    """
    connector = trainer._logger_connector
    log = type(connector).log_eval_end_metrics

    def log_others(metrics: dict[str, Any]) -> None:
        log(connector, {key: value for key, value in metrics.items() if key != name})

    connector.log_eval_end_metrics = log_others  # type: ignore[method-assign]


def detach_logging(trainer: pl.Trainer) -> None:
    """Remove the module's `log` and `log_dict` from the callbacks.

    `fit` sets them there as attributes. Callbacks that outlive the module would keep it, and its weights, in memory.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for method in ("log", "log_dict"):
            vars(callback).pop(method, None)


# ---- the process -----------------------------------------------------------------------------------------------------


def ignore_warnings() -> None:
    """Hide warnings of Lightning that are no fault here, by their texts and categories."""
    for message, category in _WARNINGS.items():
        warnings.filterwarnings("ignore", message=message, category=category)


def forks_or_spawns(launcher: object) -> bool:
    """Return whether a strategy's launcher trains in child processes, whose module the caller never sees."""
    return isinstance(launcher, _MultiProcessingLauncher)
