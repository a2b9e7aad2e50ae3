"""What Lightning's loops count, and what a checkpoint must say of it so that a resumed run validates when it should.

All of it is private to Lightning. Its counters are the only record of what a resumed run does next. Holds for
`lightning>=2.6.6,<2.7`.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


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


def hooks_into_backward(trainer: Any, *but: type[pl.Callback]) -> bool:
    """Return whether a callback of a Trainer, or its module, has a hook around a backward. `but`: callbacks to ignore.

    A step's backward may run before Lightning has counted the step before it. `LambdaCallback` has its hooks in the
    instance.
    """
    names = "on_before_backward", "on_after_backward"
    hooks = [getattr(it, name) for it in (*trainer.callbacks, trainer.lightning_module) for name in names
             if not isinstance(it, but)]  # fmt: skip
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
