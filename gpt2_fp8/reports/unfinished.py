"""A run without a summary.json, which runs still or was killed: what its other files tell, in the form of a summary.

Its settings are those that Hydra has written, with what the run makes of them before its first step. Its first lines of
run.log say what computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.checkpoint import names
from gpt2_fp8.config import keys, own_words, parsing, run_length
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.reports import sweep_jobs

STATUS = "running or killed"
NOTE = "it runs, or was killed: without a summary.json it is read as far as its log goes."
_LARGEST = 1 << 18  # bytes
_KEY = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_.]*)\}")
_LINE = re.compile(r"\[[0-9:]{8}\] (device|precision|layers|steps) +(.*)")
_PRECISION = re.compile(
    r"(\w+)(?:, recipe \w+)?(?:, evaluation \w+)?(?:, last [0-9,]+ steps? \w+)?(?: instead of (\w+))?(?:: (.*))?"
)
_MICRO_BATCH = re.compile(r".* in micro-batches of ([0-9][0-9,]{0,10}) sequences?")


def summary(folder: Path, log: Iterable[str]) -> dict[str, Any]:
    """Return what summary.json would say of the run in `folder`, as far as it is known. `log`: the lines of run.log.

    Raises ValueError, with the reason, if its settings cannot be read.
    """
    told = {found[1]: found[2] for line in log if (found := _LINE.fullmatch(line))}  # the last: after a rollback
    config = _config(folder / sweep_jobs.HYDRA / "config.yaml", sweep_jobs.words_of(folder))
    if found := _MICRO_BATCH.fullmatch(told.get("steps", "")):
        config = replace(config, micro_batch_size=int(found[1].replace(",", "")))
    ran = _PRECISION.fullmatch(told.get("precision", ""))
    precision = {"asked": ran[2] or config.precision.name, "ran": ran[1], "reason": ran[3]} if ran else {}
    device = told.get("device", "").rpartition(" x ")[0]
    return {
        "status": STATUS,
        "config": asdict(config),
        "precision": precision,
        "kernels": {"layers": told["layers"].partition(";")[0]} if "layers" in told else {},
        "device": "cpu" if device == "the CPU" else device or None,
        "checkpoint": {"last": _newest(folder / "checkpoints")},
    }


def counts(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the counts of a summary that the rows of metrics.csv have."""

    def last(key: str) -> int:
        return int(max((row[key] for row in rows if 0 <= row.get(key, -1) < 2**63), default=0))

    return {
        "steps": last("step"),
        "skipped_steps": last("skipped_steps"),
        "divergence": {"reruns": last("bf16_reruns")},
    }


def _config(path: Path, words: Iterable[str]) -> RunConfig:
    """Return the settings that Hydra has written, as the run has them once its length is known."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("it is too large")
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has aliases, which Hydra does not write")
        plain = yaml.safe_load(text)
        config, found = parsing.build(RunConfig, _resolved(plain, plain))
    except FileNotFoundError:
        raise ValueError("it has neither summary.json nor .hydra/config.yaml: it never began, or is no run") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"it has no summary.json, and .hydra/config.yaml cannot be read: {error}") from None
    if config is None:
        raise ValueError(f"it has no summary.json, and .hydra/config.yaml is none: {found[0].problem.cause}")
    config = run_length.fitted(config, own_words.keys(words))
    counted = config.trainer.max_epochs is None and run_length.limits(config)
    return run_length.in_steps(config, None) if counted else config


def _resolved(value: Any, whole: Any) -> Any:
    """Return a value in which `${KEY}` is what stands at that key. Nothing else is looked up."""
    if isinstance(value, dict):
        return {key: _resolved(entry, whole) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry, whole) for entry in value]
    if isinstance(value, str) and (found := _KEY.fullmatch(value)):
        named = keys.value_of(whole, found[1])
        return value if isinstance(named, (dict, list)) else named
    return value


def _newest(folder: Path) -> str | None:
    """Return the newest checkpoint in a folder; None if there is none."""
    try:
        steps = {step: entry.name for entry in folder.iterdir() if (step := names.step_of(entry.name)) is not None}
    except OSError:
        return None
    return str(folder / steps[max(steps)]) if steps else None
