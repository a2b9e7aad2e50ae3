"""A run that is complete: it is not continued with other settings, since no step would be trained with them.

Its folder would then say that these settings have reached its results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpt2_fp8.config import bounded, run_length
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import key_paths, show, value_of
from gpt2_fp8.config.schema import FREE_OF_WEIGHTS, RunConfig

_SHOWN = 5  # keys; a longer list helps nobody
_ABSENT = object()
# What decides a training: neither its length, nor where it is written, nor how its text is fetched.
_DECIDES = (
    *("seed", "data.seed", "data.name", "global_batch_size", "trainer.overfit_batches", "document_mask", "attention"),
    *("compile", "compile_mode", "cuda_graphs", "activation_checkpointing"),
)
_DECIDES_BELOW = ("model.", "precision.", "recipe.", "optim.", "optimizer.", "penalty.")
_NO_NUMBERS = ("precision.fallback", "precision.evaluation")  # of the training
# What a checkpoint is never continued with, however long the run is.
_FIXED = ("seed", "data.seed", "data.name", "global_batch_size", "trainer.overfit_batches", "optimizer.name")


def summary(folder: Path) -> dict[str, Any]:
    """Return what the `summary.json` in a folder holds; nothing if there is none, or if it is no run's."""
    found: Any = None
    with suppress(OSError, ValueError):
        found = bounded.read_json(folder / "summary.json")
    return found if isinstance(found, dict) else {}


def check(folder: Path, config: RunConfig) -> Iterator[Finding]:
    """Find what is set otherwise than the complete run in `folder`, which `config` continues, was trained with."""
    found = summary(folder)
    was, steps = found.get("config"), found.get("steps")
    if not isinstance(was, dict) or type(steps) is not int or not _is_complete(found, was, steps, folder, config):
        return
    changed = [key for key in _compared(found, was, config) if _was(was, key, config) != value_of(config, key)]
    if "seed" in changed and "data.seed" in changed:
        changed.remove("data.seed")  # it follows
    if not changed:
        return
    told = [
        f"{key} was {show(_was(was, key, config))} and is now {show(value_of(config, key))}" for key in changed[:_SHOWN]
    ]
    more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    cause = f"{', '.join(told)}{more}, and the run in {folder} is complete: nothing would be trained with it"
    yield Finding(tuple(changed), Problem(cause, _remedy(changed, found.get("ended_by"), steps)))


def _is_complete(found: dict[str, Any], was: dict[str, Any], steps: int, folder: Path, config: RunConfig) -> bool:
    """Return whether the run of a summary `found`, whose configuration `was` that, has no step left of `config`."""
    last = Path(str(value_of(found, "checkpoint.last"))).name
    saved = folder / "checkpoints" / last
    if found.get("status") != "completed" or config.trainer.fast_dev_run or not (saved / "manifest.json").is_file():
        return False
    named = config.ckpt_path == "last" or (config.ckpt_path == "best" and found.get("best_val_loss_step") == steps)
    if not named and os.path.realpath(str(config.ckpt_path)) != os.path.realpath(saved):
        return False
    known, before = run_length.limits(config), value_of(was, "trainer.max_time")
    if found.get("ended_by") == "trainer.max_time":
        return config.trainer.max_time is not None and config.trainer.max_time == before
    if config.trainer.max_epochs is None:
        return min(known.values(), default=0) == steps
    same = config.trainer.max_epochs == value_of(was, "trainer.max_epochs")
    return same and (found.get("ended_by") == "trainer.max_epochs" or steps in known.values())


def _compared(found: dict[str, Any], was: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield the keys that decide the training of `config` and of a run that `was` that."""
    names = {config.precision.name, _value(was, "precision.name")}
    without: tuple[str, ...] = ("recipe.",) if names <= {"bf16", "fp32"} else ()
    if config.trainer.max_epochs is not None:  # a warm-up and a decay are fitted to the steps once these are counted
        without += ("optim.warmup_steps", "optim.decay_steps")
    for key in key_paths(RunConfig):
        decides = (key in _DECIDES or key.startswith(_DECIDES_BELOW)) and key not in _NO_NUMBERS
        both = hasattr(*_place(config, key)) and _was(was, key, config) is not _ABSENT
        if decides and both and not key.startswith(without):
            yield key


def _was(was: dict[str, Any], key: str, config: RunConfig) -> Any:
    """Return the value of a key in `was`. Of a run from before there was the key: the schema's, if it has one."""
    group, name = _place(config, key)
    return _value(was, key, getattr(type(group), name, _ABSENT))


def _place(config: RunConfig, key: str) -> tuple[object, str]:
    """Return the object of `config` in which a dotted key is, if it is there, and its name in it."""
    group, _, name = key.rpartition(".")
    return value_of(config, group) if group else config, name


def _value(was: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a dotted key of plain values; `default` if they do not have it."""
    group, _, name = key.rpartition(".")
    within = value_of(was, group) if group else was
    return within.get(name, default) if isinstance(within, dict) else default


def _shapes_weights(key: str) -> bool:
    group, _, name = key.partition(".")
    return group == "model" and name not in FREE_OF_WEIGHTS


def _remedy(changed: list[str], ended_by: object, steps: int) -> str:
    """Return the ways out: a longer run is one if a checkpoint may be continued with what has `changed`."""
    fixed = [key for key in changed if key in _FIXED or _shapes_weights(key)]
    back = "set it back" if len(changed) == 1 else "set them back"
    longer = f"trainer.max_steps={steps + 1} or more" if ended_by == "trainer.max_steps" else f"a larger {ended_by}"
    ways = [back, *([] if fixed else [f"{longer} trains on with it"]), "another run_name begins another run"]
    return "; ".join(ways)
