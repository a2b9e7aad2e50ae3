"""`precision=auto`: a run's precision and recipe, decided before anything of it is built.

If the GPU can do FP8, the candidates are measured, unless this machine has measured them before (`auto_cache`). Then
`precision.choose` decides. Otherwise there is nothing to choose. One process decides for all: the processes that
Lightning starts for other GPUs find the answer in their environment.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.checkpoint.load import read_plain
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.model_checks import recipe_multiple
from gpt2_fp8.config.precision_schema import AutoPrecisionConfig, AutoRecipe
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure import auto_cache
from gpt2_fp8.measure.auto_candidates import (
    FORMAT,
    OUT_OF_MEMORY,
    candidates,
    concrete,
    figures,
    key,
    unfit,
    unknown,
)
from gpt2_fp8.precision.choose import Choice, choose
from gpt2_fp8.precision.support import why_not_fp8, why_not_recipe
from gpt2_fp8.runtime import launcher

ANSWER = "GPT2_FP8_AUTO"  # rank 0's answer, in the environment of the processes that Lightning starts


def decide(
    config: RunConfig, device: Literal["cuda", "cpu"], world_size: int, checkpoint: Path | None, rank: int
) -> tuple[RunConfig, Choice | None]:
    """Return the configuration with a concrete precision and recipe, and how `precision=auto` chose them.

    The choice is None if another precision was asked for; nothing is changed then. A run that continues from a
    `checkpoint` keeps the precision of its training. Raises UserError if no process starts before the others and could
    measure.
    """
    if not isinstance(config.precision, AutoPrecisionConfig):
        return config, None
    if rank and (answer := os.environ.get(ANSWER)):
        choice = Choice(**json.loads(answer))
    else:
        choice = _choose(config, config.precision.tolerance, device, world_size, checkpoint)
        told = {"precision": choice.precision, "recipe": choice.recipe, "reason": choice.reason}
        os.environ[ANSWER] = json.dumps(told)
    return concrete(config, choice.precision, choice.recipe), choice


def _choose(config: RunConfig, tolerance: float, device: str, world_size: int, checkpoint: Path | None) -> Choice:
    """Choose what to train in: as before, or the only possibility here, or by measuring."""
    if checkpoint is not None:
        return _as_before(config, checkpoint)
    if reason := _why_not(config, device):
        return Choice(precision="bf16" if device == "cuda" else "fp32", recipe=None, reason=reason)
    started = launcher.current()
    if world_size > 1 and (config.trainer.num_nodes > 1 or started.several):
        how = f"{started.name} has started all at once" if started.several else "they start on several nodes"
        raise UserError.of(
            f"precision=auto is measured by one process before the others start, and here {how}",
            "see what it chooses on one GPU (trainer=gpu), then name that: precision=NAME recipe=NAME",
        )
    cases = candidates(config, world_size)
    under = key(cases)
    measured_on, known = auto_cache.load(under) or ("", [])
    lacking = unknown(cases, known)
    if lacking and config.trainer.fast_dev_run:
        own = "current" if why_not_recipe("delayed") else "delayed"
        recipe = own if isinstance(config.recipe, AutoRecipe) else config.recipe.name
        return Choice(precision=FORMAT, recipe=recipe, reason="trainer.fast_dev_run=true measures nothing")
    if lacking:
        measured_on, known = figures(cases, under, known)
    choice = choose(known[0], known[1:], tolerance)
    where = f"measured on this machine on {measured_on}, {len(known)} candidates"
    if any(candidate.problem == OUT_OF_MEMORY for candidate in known):
        where += "; those out of memory are measured again next time"
    return replace(choice, reason=f"{choice.reason} ({where})", measured_on=measured_on)


def _as_before(config: RunConfig, checkpoint: Path) -> Choice:
    """Return what a checkpoint was trained in. A recipe that the user names now replaces its own."""
    before = read_plain(checkpoint, "precision")
    if "ran" not in before:
        cause = f"{checkpoint} does not say what it was trained in, and precision=auto stays with that"
        raise CheckpointError.of(cause, "name it: precision=NAME")
    ran, recipe = before["ran"], None
    if ran.startswith("fp8"):
        keeps_scales = (
            read_plain(checkpoint, "training_step").get("scaling", {}).get("settings")
        )  # only the recipe `delayed` has them
        recipe = before.get("recipe") or ("delayed" if keeps_scales else "current")
        recipe = recipe if isinstance(config.recipe, AutoRecipe) else config.recipe.name
    return Choice(precision=ran, recipe=recipe, reason="what the checkpoint was trained in; precision=NAME changes it")


def _why_not(config: RunConfig, device: str) -> str | None:
    """Return why FP8 cannot compete here; None if it can."""
    if device == "cpu":
        reason = why_not_fp8() if config.trainer.accelerator != "cpu" else None
        return reason or "the CPU has no FP8 matrix units"
    if reason := why_not_fp8():
        return reason
    if not isinstance(config.recipe, AutoRecipe) and (reason := why_not_recipe(config.recipe.name)):
        return f"recipe={config.recipe.name} cannot run on this GPU: {reason}"
    if unfit(config, config.recipe.name):
        multiple = recipe_multiple(config.recipe.name)
        return f"FP8 matrix products need the model's widths and a sequence's tokens to be multiples of {multiple}"
    return None
