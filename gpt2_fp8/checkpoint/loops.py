"""Making Lightning resume into a validation that a checkpoint was taken before."""

from __future__ import annotations

from typing import Any

VALIDATION = "validation.json"  # in a checkpoint's folder: the validation of its step is done, and what it gave


def resume_into_validation(fit_loop: dict[str, Any]) -> None:
    """Change a fit loop's saved state so that resuming begins with the whole validation of the saved step.

    Lightning 2.6 takes a checkpoint of `on_train_batch_end`, or of the midst of a validation, for one whose validation
    is done, and trains on: `_TrainingEpochLoop.advance` fast-forwards the counters. The only state from which it does
    validate first is "in the midst of the evaluation" (`_EvaluationLoop.update_restart_stage`) after a finished
    training batch (`_TrainingEpochLoop.update_restart_stage`), so this is what the counters are made to say.
    """
    trained = fit_loop["epoch_loop.batch_progress"]
    for count in (trained["total"], trained["current"]):
        count["completed"] = count["processed"]
    validated = fit_loop["epoch_loop.val_loop.batch_progress"]
    for count in (validated["total"], validated["current"]):
        count.update(ready=1, started=1, processed=0, completed=0)
    validated["is_last_batch"] = False
