"""What must be the same in runs that go on from one checkpoint, and in runs that a table compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gpt2_fp8.config.data_schema import Mixed
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.mixture import sources_of
from gpt2_fp8.config.schema import FREE_OF_WEIGHTS, RunConfig

NO_TEXT = ("name", "num_workers", "cache_dir")  # settings of a source that do not decide its tokens or their order
ORDER = ("seed", "weights")  # settings that order the text for training, and leave the validation as it is


def other_run(before: RunConfig, config: RunConfig) -> Iterator[Problem]:
    """Yield in what a leg could not go on from the checkpoint of another one."""
    was, now = ({**_fixed(one), **_text(one)} for one in (before, config))
    if 0 in (before.data.val_sequences, config.data.val_sequences):  # a run may stop validating, or begin to
        was, now = ({k: v for k, v in one.items() if not k.endswith(".val_sequences")} for one in (was, now))
    for key in _different(was, now):
        cause = f"{key}={show(now.get(key))} cannot go on from a checkpoint of {key}={show(was.get(key))}"
        yield Problem(cause, f"give all legs the same {key}, and with --from all conditions")


def other_text(first: RunConfig, config: RunConfig, trained: bool) -> Iterator[Problem]:
    """Yield why the figure of a condition would be of another text than the first one's.

    `trained`: the figure is a training loss, of the batches of equal steps; otherwise it is a validation loss.
    """
    was, now = (_batches(one) if trained else _validation(one) for one in (first, config))
    for key in _different(was, now):
        cause = f"{key}={show(now.get(key))}, and the first condition has {key}={show(was.get(key))}"
        kind = "training" if trained else "validation"
        yield Problem(f"{cause}: losses of two {kind} texts cannot be compared", f"give all conditions the same {key}")


def _different(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the keys in which settings differ; of two choices of `data` that differ, this key alone."""
    keys = [key for key in dict.fromkeys([*was, *now]) if was.get(key) != now.get(key)]
    if "data" not in keys:
        return keys
    own = [key for key in keys if key.startswith("data.")]
    return [key for key in keys if key not in own and (own or key != "data")]


def _batches(config: RunConfig) -> dict[str, Any]:
    text = {key: value for key, value in _text(config).items() if not key.endswith(".val_sequences")}
    return text | {"model.n_positions": config.model.n_positions, "global_batch_size": config.global_batch_size}


def _validation(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide the validation sequences. Training files do where some of their text is held out.

    The order of the training text does not.
    """
    found = _text(config)
    apart = [key.removesuffix("val_files") for key, value in found.items() if key.endswith(".val_files") and value]
    without = {f"{source}train_files" for source in apart}
    kept = {key: v for key, v in found.items() if key not in without and key.rpartition(".")[2] not in ORDER}
    return kept | {"model.n_positions": config.model.n_positions}


def _text(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide a run's text, its order and its validation sequences, by their keys."""
    found: dict[str, Any] = {"data": config.data.name}
    for name, source in sources_of(config.data):
        found |= _source(f"data.sources.{name}." if name else "data.", source)
    if config.data.kind == "mixture":
        found |= {"data.seed": config.data.seed, "data.weights": config.data.weights}
    return found


def _source(prefix: str, source: Mixed) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in asdict(source).items() if key not in NO_TEXT}


def _fixed(config: RunConfig) -> dict[str, Any]:
    """Return the settings that a checkpoint holds its run to, but for those of its text."""
    model = {f"model.{key}": value for key, value in asdict(config.model).items() if key not in FREE_OF_WEIGHTS}
    return model | {"optimizer": config.optimizer.name, "global_batch_size": config.global_batch_size}
