"""What the module adds to a checkpoint, and what a run takes from one: what it refuses, restores or sets itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.compat.torch_private import scheduler_counts
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show, value_of
from gpt2_fp8.config.run_length import last_step, steps_in_fp8
from gpt2_fp8.config.schema import FP8PrecisionConfig, RegisteredOptimizer, RunConfig
from gpt2_fp8.config.shown import format_count
from gpt2_fp8.engine.optim import build_optimizer, build_schedule
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.runtime import rng
from gpt2_fp8.train import trained
from gpt2_fp8.train.strategies import own_part

log = logging.getLogger(__name__)

_PARTS = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "rng", "TokenDataModule"}


def add_state(checkpoint: dict[str, Any], step: TrainingStep) -> None:
    """Add every rank's random numbers, what a step begins with, and what the run computed in. Collective."""
    checkpoint["rng"] = rng.gather()
    checkpoint["model"] = asdict(step.config.model)
    checkpoint["optimizer"] = _label(step.config)
    checkpoint["training_step"] = step.state_dict()
    plan = step.plan
    checkpoint["precision"] = {
        "asked": plan.asked, "ran": plan.ran, "recipe": plan.recipe, "reason": plan.reason, "fell_back": plan.fell_back,
    }  # fmt: skip


def take_state(checkpoint: dict[str, Any], trainer: pl.Trainer, step: TrainingStep) -> list[Any]:
    """Check a checkpoint that Lightning has read, and restore what can be restored now.

    The configuration, not the checkpoint, says the optimizer's settings: they are replaced in place. Returns the
    generators' states of every rank, for when nothing else draws numbers before training. Raises UserError where the
    checkpoint is another model's, or of other text, with every difference.
    """
    config, own = step.config, _own_state(checkpoint, step)
    others = list(trained.other_settings(config.model, checkpoint.get("model", {})))
    if trainer.state.fn != TrainerFn.FITTING:
        trained.refuse(others)
        step.load_state_dict(own)
        return []
    path = Path(str(trainer.ckpt_path))
    if missing := sorted(_PARTS - checkpoint.keys()):  # as in one with weights alone
        cause = f"{path} cannot be continued from: it has no {', '.join(missing)}"
        raise CheckpointError.of(cause, "name a run's checkpoint; or init_from=PATH, which takes only the weights")
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # whose tokenizer gives the weights' shapes
    others += datamodule.other_settings(checkpoint["TokenDataModule"])
    others += _other_run(path, checkpoint, config)
    trained.refuse(list(dict.fromkeys(others)))  # the text's seed is the run's, unless it has its own
    step.load_state_dict(own)
    changes = [*_keep_own_settings(path, checkpoint, step), *_changed_precision(checkpoint, step)]
    changes += _changed_settings(checkpoint, config)
    if ("average" in own) != step.average.exists:
        done, begins = checkpoint["global_step"], step.average.exists
        when = f"begins after step {max(done, config.optim.ema_start_step)}" if begins else f"ends with step {done}"
        changes.append(f"the average of weights {when}, by optim.ema_decay")
    for change in changes if trainer.is_global_zero else ():
        log.warning("%s", change)
    return list(checkpoint["rng"])


def _own_state(checkpoint: dict[str, Any], step: TrainingStep) -> dict[str, Any]:
    """Return what a checkpoint has of a training step, of the average of a divided model this rank's rows."""
    saved: dict[str, Any] = dict(checkpoint.get("training_step", {}))
    if step.average.exists and "average" in saved:
        weights = dict(step.model.named_parameters())
        saved["average"] = {name: own_part(value, weights.get(name)) for name, value in saved["average"].items()}
    return saved


def _other_run(path: Path, checkpoint: Mapping[str, Any], config: RunConfig) -> Iterator[Problem]:
    """Yield why a run of `config` cannot go on from the checkpoint `path`: its end, its optimizer, its seed."""
    if (step := checkpoint["global_step"]) > (end := last_step(config)):
        others = [key for key in ("max_tokens", "max_epochs") if getattr(config.trainer, key) is not None]
        also = "".join(f", and a trainer.{key} that comes to as much" for key in others)
        cause = f"trainer.max_steps={end} ends before {path}, of step {step}"
        yield Problem(cause, f"trainer.max_steps={step} or more{also}")
    there, here = checkpoint.get("optimizer") or "adamw", _label(config)
    if there != here:
        cause = f"{path} holds the state of optimizer={there}, and this run has optimizer={here}"
        yield Problem(cause, f"begin anew from its weights: run_name=NAME init_from={path} ckpt_path=null")
    seed = value_of(checkpoint, f"{trained.KEY}.seed")
    if type(seed) is int and seed != config.seed:  # weights and random numbers are the checkpoint's
        cause = f"this run cannot be continued exactly: seed was {seed}, and is now {config.seed}"
        yield Problem(cause, "set it back as it was; or start a new run, with init_from=CHECKPOINT to keep the weights")


def _changed_precision(checkpoint: Mapping[str, Any], step: TrainingStep) -> Iterator[str]:
    """Say that validations, or the next steps, of a run in FP8 compute in another precision than before `checkpoint`.

    The command line may not have changed: a checkpoint of before `precision.evaluation` was validated in FP8.
    """
    plan, done, in_bf16 = step.plan, checkpoint["global_step"], step.attempts.last_in_bf16
    before = value_of(checkpoint, f"{trained.KEY}.precision.evaluation") or FP8PrecisionConfig.evaluation
    now = "bf16" if plan.evaluates_in_bf16 else "fp8"
    if plan.fp8 and str(value_of(checkpoint, "precision.ran")).startswith("fp8") and before != now:
        yield f"validations are in {now} from here on, and were in {before}: precision.evaluation={before} goes on so"
    if in_bf16 and plan.fp8 and steps_in_fp8(step.config) > done:
        yield f"the last {format_count(in_bf16, 'step')} were computed in bf16, and the next are in FP8 again"


def _changed_settings(checkpoint: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Name settings of what steps compute that are not as before `checkpoint`: a word may have been left out."""
    before, now = checkpoint.get(trained.KEY, {}), asdict(config)
    keys = ["document_mask", "model.dropout", "precision.reduce"]
    keys += [f"{group}.{name}" for group in ("penalty", "optim", "optimizer") for name in now[group]]
    pairs = [(key, value_of(before, key), value_of(now, key)) for key in keys]  # None: it had none, or not the key
    if changed := [f"{key}={show(new)} ({show(old)} before)" for key, old, new in pairs if old not in (None, new)]:
        yield f"from step {checkpoint['global_step'] + 1} on {', '.join(changed)}"


def _check_moments(path: Path, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Raise CheckpointError for a state of other shapes than the parameters': torch's kernels trust them."""
    named = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if saved["state"].keys() != set(named) or len(named) != len(parameters):  # every one has a gradient in each step
        cause = f"the optimizer state is of {len(saved['state'])} parameters, and the model has {len(parameters)}"
        raise CheckpointError.of(f"{path} cannot be continued from: {cause}", "use the model that it is of")
    for index, parameter in zip(named, parameters, strict=True):
        for name, tensor in saved["state"][index].items():
            fits = name == "step" or (tensor.shape == parameter.shape and tensor.is_floating_point())
            if not fits:
                cause = f"the optimizer's {name} {index} is {tuple(tensor.shape)}, {tensor.dtype}"
                raise CheckpointError.of(f"{path} cannot be continued from: {cause}", "use the model that it is of")


def _keep_own_settings(path: Path, checkpoint: dict[str, Any], step: TrainingStep) -> Iterator[str]:
    """Replace the settings in the saved optimizer and schedule states by the configuration's, but not the moments.

    Says how the next step's learning rates change by that, if they do.
    """
    config = step.config
    optimizer = build_optimizer(step.model, config.optim, config.optimizer)
    schedule = build_schedule(optimizer, config.optim, last_step(config))
    done, groups = checkpoint["lr_schedulers"][0]["last_epoch"], checkpoint["optimizer_states"][0]["param_groups"]
    rates = [rate * schedule.lr_lambdas[0](done) for rate in schedule.base_lrs]
    registered = isinstance(config.optimizer, RegisteredOptimizer)  # what else it keeps in its groups is not known
    if not registered:
        _check_moments(path, optimizer, checkpoint["optimizer_states"][0])
    of_index = {index: group for group in groups for index in group["params"]}
    divided = []  # as the rates of `optim` divide parameters now, which keep their order (`engine.optim`)
    for fresh, lr in zip(optimizer.state_dict()["param_groups"], rates, strict=True):
        own = {"initial_lr", "weight_decay", "params"} if registered else fresh.keys()
        saved = of_index.get(next(iter(fresh["params"]), None), groups[0])
        divided.append(saved | {name: value for name, value in fresh.items() if name in own} | {"lr": lr})
    checkpoint["optimizer_states"][0]["param_groups"] = divided
    checkpoint["lr_schedulers"] = [schedule.state_dict() | scheduler_counts(done, rates)]
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    ordered = [names.get(parameter, "?") for group in optimizer.param_groups for parameter in group["params"]]
    yield from _changed_rates(groups, divided, ordered, done + 1)


def _changed_rates(saved: list[Any], now: list[Any], names: list[str], step: int) -> Iterator[str]:
    """Say how rates change with a step: the first group's, which logs show, and by name those that change otherwise."""
    of_index = {index: group.get("lr") for group in saved for index in group["params"]}
    changes: dict[tuple[Any, float], list[str]] = {(saved[0].get("lr"), now[0]["lr"]): []}
    for group in now:
        for index in group["params"]:
            changes.setdefault((of_index.get(index), group["lr"]), []).append(names[index])
    for number, ((before, lr), named) in enumerate(changes.items()):
        whose = f" of {', '.join(named[:2])}{', ...' * (len(named) > 2)}" if number else ""
        if isinstance(before, float) and f"{before:.1e}" != f"{lr:.1e}":
            told = f"learning rate{whose} {lr:.1e} from step {step} on, {before:.1e} before"
            yield f"{told}: the schedule or rate is not the checkpoint's"


def _label(config: RunConfig) -> str:
    return getattr(config.optimizer, "label", config.optimizer.name)
