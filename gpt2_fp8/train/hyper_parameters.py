"""What tells a run apart from others: for TensorBoard's table of runs, and its configuration as a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.config.keys import show, value_of
from gpt2_fp8.config.schema import PlainPrecisionConfig, RunConfig

_ALWAYS = ("optim.lr", "seed")
_NO_DIFFERENCE = {"run_name", "ckpt_path", "notes"}


def hyper_parameters(config: RunConfig, words: Sequence[str]) -> dict[str, bool | int | float | str]:
    """Return what was typed for this run or job, beside what every run has, by the names of keys.

    A table of all keys would be too wide to read. `words`: the run's overrides.
    """
    recipe = "none" if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name
    found: dict[str, bool | int | float | str] = {
        "model": config.model.name, "precision": config.precision.name, "recipe": recipe,
        "optimizer": config.optimizer.name,
    }  # fmt: skip
    typed = [word.lstrip("+~").partition("=")[0] for word in words]
    for key in (*_ALWAYS, *typed):
        if key not in _NO_DIFFERENCE and not key.startswith(("hydra", "tags", "logger", "callbacks")):
            value = value_of(config, key)
            if isinstance(value, (bool, int, float, str)):
                found[key] = value
            elif isinstance(value, (list, type(None))):
                found[key] = show(value)
    return found | {f"tags.{key}": value for key, value in config.tags.items()} | _notes(config)


def _notes(config: RunConfig) -> dict[str, str]:
    return {"notes": config.notes} if config.notes else {}


def as_text(config: RunConfig) -> str:
    """Return the whole configuration as YAML."""
    return str(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))
