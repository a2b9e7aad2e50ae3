"""What a run takes from a checkpoint, and what it refuses or sets itself. Plain torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gpt2_fp8.backends.base import Backend
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.compat.torch_private import scheduler_counts
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import value_of
from gpt2_fp8.config.run_length import last_step, steps_in_fp8
from gpt2_fp8.config.schema import FREE_OF_WEIGHTS, FP8PrecisionConfig, ModelConfig, RunConfig
from gpt2_fp8.config.shown import counted
from gpt2_fp8.engine.optim import build_optimizer
from gpt2_fp8.engine.saved_moments import check_moments
from gpt2_fp8.engine.schedule import build_schedule
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.train import saved_config

_PARTS = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "rng", "TokenDataModule"}
_SHOWN = 5  # weights that differ; a list of all of them helps nobody


def other_settings(model: ModelConfig, given: dict[str, Any]) -> Iterator[Problem]:
    """Yield every difference between a checkpoint's architecture, `given`, and this one.

    Weights of equal shapes may still mean something else. A checkpoint of format 1 gives nothing. One from before the
    model had options has GPT-2's.
    """
    given = saved_config.with_model_options(given) if given else {}
    for key, own in asdict(model).items():
        if key not in FREE_OF_WEIGHTS and key in given and given[key] != own:
            cause = f"the checkpoint is of another model: model.{key} is {given[key]} there, {own} here"
            yield Problem(cause, "use the model= that the checkpoint was trained with")


def other_seed(config: RunConfig, given: object) -> Iterator[Problem]:
    """Yield that the run has another `seed` than the configuration in its checkpoint, `given`, which may be anything.

    The weights and the random numbers are the checkpoint's. So the new seed would name the run, and do nothing.
    """
    seed = given.get("seed") if isinstance(given, Mapping) else None
    if type(seed) is int and seed != config.seed:
        cause = f"this run cannot be continued exactly: seed was {seed}, and is now {config.seed}"
        yield Problem(cause, "set it back as it was; or start a new run, with init_from=CHECKPOINT to keep the weights")


def other_validation(checkpoint: Mapping[str, Any], backend: Backend) -> str | None:
    """Say that the validations of a run in FP8 compute in another precision than those before `checkpoint`; or None.

    The command line may not have changed: a checkpoint of before `precision.evaluation` was validated in FP8.
    """
    if not (backend.fp8 and str(value_of(checkpoint, "precision.ran")).startswith("fp8")):
        return None
    before = value_of(checkpoint, f"{saved_config.KEY}.precision.evaluation") or FP8PrecisionConfig.evaluation
    now = "bf16" if backend.evaluates_in_bf16 else "fp8"
    if before == now:
        return None
    return (
        f"validation losses are computed in {now} from here on, and were in {before} before: they differ by what FP8 "
        f"rounds; precision.evaluation={before} goes on as it was"
    )


def fp8_again(done: int, step: TrainingStep) -> str | None:
    """Say that a run in FP8, whose last steps of `done` were in bf16, computes the next ones in FP8; or None."""
    before = step.attempts.last_in_bf16
    if not before or not step.plan.fp8 or steps_in_fp8(step.config) <= done:
        return None
    return (
        f"the last {counted(before, 'step')} before step {done + 1} were computed in bf16 (precision.bf16_last_steps), "
        "and the next are in FP8 again: the run ends later now, or with fewer in bf16"
    )


def refuse_parts(path: Path, keys: Collection[str]) -> None:
    """Raise CheckpointError if the checkpoint `path` lacks a part of a run's state, as one with weights alone does."""
    if missing := sorted(_PARTS - set(keys)):
        cause = f"{path} cannot be continued from: it has no {', '.join(missing)}"
        raise CheckpointError.of(cause, "name a run's checkpoint; or init_from=PATH, which takes only the weights")


def refuse(differences: list[Problem]) -> None:
    """Raise CheckpointError with every difference, if there are any."""
    if differences:
        raise CheckpointError(differences)


def refuse_longer(path: Path, step: int, config: RunConfig) -> None:
    """Raise UserError if the checkpoint `path`, of `step`, is after the end of the run."""
    if step > (end := last_step(config)):
        others = [key for key in ("max_tokens", "max_epochs") if getattr(config.trainer, key) is not None]
        also = "".join(f", and a trainer.{key} that comes to as much" for key in others)
        cause = f"trainer.max_steps={end} ends before {path}, of step {step}"
        raise UserError.of(cause, f"trainer.max_steps={step} or more{also}")


def refuse_other_weights(model: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError with the first differences between two state dicts in names, shapes and dtypes.

    torch would silently cast weights of another dtype, and change them.
    """
    here = {name: tuple(tensor.shape) for name, tensor in model.items()}
    there = {name: tuple(tensor.shape) for name, tensor in given.items()}
    names = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    if names:
        remedy = "use the model= and data.tokenizer= that the checkpoint was trained with"
        raise CheckpointError([_difference(name, here.get(name), there.get(name), remedy) for name in names[:_SHOWN]])
    if names := [name for name in sorted(here) if model[name].dtype != given[name].dtype]:
        remedy = "give a checkpoint whose weights are those of a run, or convert them where they come from"
        raise CheckpointError(
            [_difference(name, model[name].dtype, given[name].dtype, remedy) for name in names[:_SHOWN]]
        )


def _difference(name: str, own: Any, given: Any, remedy: str) -> Problem:
    own, given = ("nothing" if value is None else value for value in (own, given))
    return Problem(f"the checkpoint does not fit the model: {name} is {given} there, {own} here", remedy)


def refuse_other_optimizer(path: Path, given: object, config: RunConfig) -> None:
    """Raise UserError unless the checkpoint `path` is of this optimizer. `given` is its name there; None: AdamW.

    Checkpoints from before there was a choice do not name it.
    """
    there, here = given or "adamw", config.optimizer.name
    if there != here:
        cause = f"{path} holds the state of optimizer={there}, and this run has optimizer={here}"
        anew = f"run_name=NAME init_from={path} ckpt_path=null"
        raise UserError.of(cause, f"begin anew from its weights: {anew}")


def keep_own_settings(path: Path, checkpoint: dict[str, Any], model: nn.Module, config: RunConfig) -> str | None:
    """Replace the settings in the saved optimizer and schedule states by the configuration's, in place.

    The moments and the step stay. Returns in words how the next step's learning rate changes by that; None: it does
    not. Raises CheckpointError for moments that are not the model's.
    """
    optimizer = build_optimizer(model, config.optim, config.optimizer)
    schedule = build_schedule(optimizer, config.optim, last_step(config))
    step = checkpoint["lr_schedulers"][0]["last_epoch"]
    rates = [rate * schedule.lr_lambdas[0](step) for rate in schedule.base_lrs]
    try:
        check_moments(optimizer, checkpoint["optimizer_states"][0])
    except ValueError as error:
        raise CheckpointError.of(f"{path} cannot be continued from: {error}", "use the model that it is of") from None
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    before, now = groups[0].get("lr"), f"{rates[0]:.1e}"
    for saved, fresh, lr in zip(groups, optimizer.param_groups, rates, strict=True):
        settings = {key: value for key, value in fresh.items() if key != "params"}
        saved.update(settings, lr=lr)
    checkpoint["lr_schedulers"] = [schedule.state_dict() | scheduler_counts(step, rates)]
    if not isinstance(before, float) or f"{before:.1e}" == now:
        return None
    return f"learning rate {now} from step {step + 1} on, {before:.1e} before: the schedule is not the checkpoint's"
