"""Runs, as their folders tell, and the conditions that they are repetitions of: runs that differ in the seed alone.

A summary may be damaged or a stranger's: a value of another type than a run writes counts as missing.

A logged training loss is the mean of an interval of steps. So the mean over whole intervals is exact, and the loss at a
point is the mean of a window of tokens before it. Training time is what the log measures: it leaves out validation,
samples, and a process's first step (compilation).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_fp8.config import disk, own_words
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import line
from gpt2_fp8.train import metrics_csv

Array = NDArray[np.float64]
_ABSURD = 1e15  # a damaged log's
COMPLETED = "completed"
SUMMARY, METRICS, HYDRA = "summary.json", "metrics.csv", ".hydra"
_COLUMNS = {"train_loss", "val_loss", "tokens", "tokens_per_second", "step_time", "memory_gb", "gpu_power_watts"}
_SEEDS = ("seed", "data.seed")
# What does not change what is trained: where it is written, what is logged or scored besides, how text is fetched.
_NO_CONDITION = (
    *(*_SEEDS, "run_name", "notes", "ckpt_path", "data.num_workers", "data.cache_dir", "data.validation", "tags"),
    *("logger.", "callbacks.", "trainer.log_every_n_steps", "trainer.val_check_interval", "trainer.profiler"),
)
_OF_SOURCE = re.compile(r"^data\.sources\.[^.]+\.")  # of a mixture: its keys are those of any data
# Keys that name a condition if they can, before others.
_TELLING = ("precision.name", "recipe.name", "precision.backend", "model.name", "optimizer.name", "optim.lr")
# What a comparison of precisions may differ in, beside them: how the same numbers are computed.
_OF_PRECISION = (
    *("precision.", "recipe.", "compile", "cuda_graphs", "attention", "activation_checkpointing", "micro_batch_size"),
    *("trainer.accelerator", "trainer.deterministic", "ran"),
)


@dataclass(frozen=True, eq=False)
class Curve:
    """What a run has logged of its training. The first three have an entry for each logged interval."""

    tokens: Array  # at the end of the interval
    seconds: Array  # of training, until then
    losses: Array  # nats a token; NaN if the log has no finite number above 0
    rates: Array  # tokens per second of each interval that has a time
    validations: Array  # of shape (2, n): tokens and losses

    @property
    def interval(self) -> float:
        """Tokens of a usual logged interval."""
        return float(np.quantile(np.diff(self.tokens, prepend=0.0), 0.5, method="higher"))

    def mean(self, at: Array, width: float) -> Array:
        """Return the mean training loss of the last `width` tokens before each of `at`; NaN if nothing was logged."""
        ends, known = np.append(0.0, self.tokens), np.isfinite(self.losses)
        lengths = np.diff(ends) * known
        low = np.maximum(0.0, at - width)
        sums = (np.append(0.0, np.cumsum(lengths * each)) for each in (1.0, np.where(known, self.losses, 0.0)))
        weight, total = (np.interp(at, ends, each) - np.interp(low, ends, each) for each in sums)
        return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)

    def seconds_at(self, tokens: Array) -> Array:
        """Return the training time at which so many tokens were trained on."""
        return np.asarray(np.interp(tokens, np.append(0.0, self.tokens), np.append(0.0, self.seconds)))

    def validation(self, at: Array) -> Array:
        """Return the validation loss after `at` tokens, on the straight line between two validations."""
        return np.asarray(np.interp(at, *self.validations))


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run. A figure is None if the run did not reach it, or does not say."""

    name: str  # its folder, as it is shown
    settings: dict[str, Any]  # the resolved configuration by dotted keys
    status: str
    asked: str | None  # the precision that was asked for
    ran: str | None  # and that ran
    reason: str | None  # why the two differ
    layers: str | None
    steps: int
    trouble: dict[str, int]  # steps skipped, ...: what is above 0
    memory_gb: float | None  # GiB, the peak
    watts: float | None  # of its first GPU, the mean of what the log has
    curve: Curve
    damage: str | None  # of its log

    @property
    def seed(self) -> str:
        """What distinguishes repetitions: the seed, and the seed of each text."""
        return " ".join(str(value) for key, value in self.settings.items() if _OF_SOURCE.sub("data.", key) in _SEEDS)


@dataclass(frozen=True, eq=False)
class Condition:
    """Runs of the same settings, and the name that tells them from the others."""

    name: str
    settings: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def fp8(self) -> bool:
        """Whether it has computed in FP8."""
        return (self.runs[0].ran or "").startswith("fp8")

    def differs(self, other: Condition) -> list[str]:
        """Return the keys, beyond precision and how it is computed, whose values are not those of `other`."""
        keys = dict.fromkeys([*self.settings, *other.settings])
        return [k for k in keys if self.settings.get(k) != other.settings.get(k) and not k.startswith(_OF_PRECISION)]


def read(tops: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in some folders, and a line for each that cannot be read. Raises OSError for one of `tops`."""
    paths = list(dict.fromkeys(path.resolve() for top in tops for path in below(top)))
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else Path("/")
    found, left_out = [], []
    for path in paths:
        try:
            found.append(_run(path, str(path.relative_to(common))))
        except ValueError as error:
            left_out.append(f"{path.relative_to(common)}: {error}")
    return found, left_out


def below(top: Path) -> Iterator[Path]:
    """Yield the folders of runs in `top`, or `top` itself if it is one. Raises OSError for `top` alone.

    A run's folder may be a sweep's too, of the same name, with jobs below it.
    """
    os.listdir(top)
    for place, folders, files in os.walk(top):
        path = Path(place)
        if {SUMMARY, METRICS} & set(files) or (HYDRA in folders and path != top):
            yield path
            if own_words.PLAN not in files:
                folders.clear()
        folders.sort(key=lambda name: (not name.isdecimal(), len(name) if name.isdecimal() else 0, name))


def summary(folder: Path) -> dict[str, Any]:
    """Return a run's `summary.json`. Raises ValueError with the reason if there is none that can be read."""
    try:
        found = disk.read_json(folder / SUMMARY)
    except FileNotFoundError:
        raise ValueError("no summary.json: it was killed, or still runs") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"summary.json cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def at(found: Any, kind: type | tuple[type, ...], *keys: str) -> Any:
    """Return what stands at nested keys of a summary, if it is of this kind; else None."""
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, kind) and not isinstance(found, bool) else None


def _run(folder: Path, name: str) -> Run:
    found = summary(folder)
    rows = metrics_csv.read(folder / METRICS, _COLUMNS)
    curve = read_curve(rows.rows)
    if not curve.losses.size:
        raise ValueError(f"metrics.csv has no training loss ({rows.damage or found.get('status')})")
    trouble = {
        "steps skipped": at(found, int, "skipped_steps"),
        "steps run again in bf16": at(found, int, "divergence", "reruns"),
        "rollbacks": at(found, int, "divergence", "rollbacks"),
    }
    logged = max((row["memory_gb"] for row in rows.rows if "memory_gb" in row), default=None)
    watts = [row["gpu_power_watts"] for row in rows.rows if _usable(row, "gpu_power_watts")]
    return Run(
        name=name, settings=dict(_flat(found.get("config"))), status=at(found, str, "status") or "unknown",
        asked=at(found, str, "precision", "asked"), ran=at(found, str, "precision", "ran"),
        reason=at(found, str, "precision", "reason"), layers=at(found, str, "kernels", "layers"),
        steps=at(found, int, "steps") or 0,
        trouble={what: times for what, times in trouble.items() if times},
        memory_gb=at(found, float, "peak_memory_gb") or logged, watts=float(np.mean(watts)) if watts else None,
        curve=curve, damage=rows.damage,
    )  # fmt: skip


def _flat(part: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested configuration under their dotted keys."""
    for key, value in part.items() if isinstance(part, dict) else ():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)


def conditions(found: Sequence[Run]) -> list[Condition]:
    """Return the conditions of runs, named by as few keys as tell them apart. A run that fell back has its own."""
    groups: dict[str, list[Run]] = {}
    for run in found:
        groups.setdefault(repr(sorted(_settings(run).items())), []).append(run)
    each = [_settings(runs[0]) for runs in groups.values()]
    rank = {key: place for place, key in enumerate(_TELLING)}
    chosen: list[str] = []
    for key in sorted({key for one in each for key in one}, key=lambda key: (rank.get(key, 9), key == "ran", key)):
        if _distinct(each, [*chosen, key]) > _distinct(each, chosen):
            chosen.append(key)
    names = [line(_name(one, chosen), 80) for one in each]
    return [Condition(*parts) for parts in zip(names, each, map(tuple, groups.values()), strict=True)]


def base_of(each: Sequence[Condition]) -> Condition:
    """Return what the others are compared with: bf16 if it ran, else any without FP8, else the first."""
    return min(each, key=lambda condition: (condition.fp8, condition.runs[0].ran != "bf16"))


def find_condition(name: str, each: Sequence[Condition]) -> Condition:
    """Return the condition of this name, or the only one whose name begins with it. Raises UserError."""
    for found in ([one for one in each if one.name == name], [one for one in each if one.name.startswith(name)]):
        if len(found) == 1:
            return found[0]
    raise UserError.of(f"--base {name} is none of the conditions", f"one of {[one.name for one in each[:10]]}")


def _settings(run: Run) -> dict[str, Any]:
    """Return what makes a run's condition. Without FP8 a recipe has no effect."""
    asked = str(run.settings.get("precision.name", run.asked))
    without = (*_NO_CONDITION, *(() if asked.startswith("fp8") else ("recipe.",)))
    kept = {key: value for key, value in run.settings.items() if not _OF_SOURCE.sub("data.", key).startswith(without)}
    return kept | {"precision.name": asked, "ran": run.ran}


def _distinct(each: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({tuple(repr(one.get(key)) for key in keys) for one in each})


def _name(found: dict[str, Any], keys: Sequence[str]) -> str:
    """Return the precision, then what the keys say; and what ran if that was another precision."""
    own = [key for key in keys if key in found and key not in ("precision.name", "ran")]
    told = [f"{key.removesuffix('.name')}={found[key]}" for key in own]
    ran = [] if found["ran"] == found["precision.name"] else [f"(ran {found['ran']})"]
    return " ".join([str(found["precision.name"]), *told, *ran])


# ---- curves ----------------------------------------------------------------------------------------------------------


def read_curve(rows: Sequence[Mapping[str, float]]) -> Curve:
    """Return the curve of a `metrics.csv`. A row that repeats a step, as after a resume, replaces the earlier one."""
    trained = {int(row["step"]): row for row in rows if "train_loss" in row and row["step"] > 0}
    ordered = [trained[step] for step in sorted(trained)]
    each = next((row["tokens"] / row["step"] for row in reversed(ordered) if _usable(row, "tokens")), 1.0)
    times = [row["step_time"] for row in ordered if _usable(row, "step_time")]
    usual = float(np.median(times)) if times else 0.0
    steps = [0, *(int(row["step"]) for row in ordered)]
    took = [
        (step - before) * row["step_time"] if _usable(row, "step_time") else (step - before - 1) * usual
        for row, (before, step) in zip(ordered, pairwise(steps), strict=True)
    ]
    checked = {row["step"] * each: row["val_loss"] for row in rows if _usable(row, "val_loss")}
    return Curve(
        tokens=each * np.array(steps[1:], dtype=float),
        seconds=np.cumsum(np.array(took, dtype=float)),
        losses=np.array([row["train_loss"] if _usable(row, "train_loss") else np.nan for row in ordered]),
        rates=np.array([row["tokens_per_second"] for row in ordered if _usable(row, "tokens_per_second")]),
        validations=np.array(sorted(checked.items())).reshape(-1, 2).T,
    )


def first_below(at: Array, values: Array, level: float) -> float:
    """Return where the straight lines between points first come down to `level`; NaN if they never do."""
    under = np.flatnonzero(values <= level)
    if not under.size:
        return float("nan")
    place = int(under[0])
    if place == 0:
        return float(at[0])
    return float(np.interp(-level, -values[[place - 1, place]], at[[place - 1, place]]))


def _usable(row: Mapping[str, float], name: str) -> bool:
    return 0 < row.get(name, -1.0) < _ABSURD
