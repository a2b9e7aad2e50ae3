"""The jobs of a sweep, as their folders tell: how each ended, what it reached, and its own overrides.

The folders may be a stranger's. Only regular files of bounded size are read, and no link is followed. A value of
another form than a run writes counts as missing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.config import json_file, sweep_plan

SUMMARY, HYDRA, METRICS = "summary.json", ".hydra", "metrics.csv"
UNFINISHED, NOT_RUN = "unfinished", "not run"
# How a run can end, in the order in which a table shows the jobs; the first three may have results to compare.
RANKS = {"completed": 0, "stopped": 0, "interrupted": 0, "diverged": 1, "data_lost": 2, "failed": 3, "refused": 3}
_LAST = 4  # what has not ended, and what has not begun
_MOST_FOLDERS = 20_000  # that are looked at
_DEEPEST = 8  # folders below the sweep's
_LARGEST_YAML = 1 << 16  # bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a sweep. A figure is None if the job did not reach it, or does not say."""

    folder: str | None  # below the sweep's; None if it did not run
    words: tuple[str, ...]
    status: str
    message: str = ""
    val_loss: float | None = None  # nats a token
    best_val_loss: float | None = None
    train_loss: float | None = None
    tokens_per_second: float | None = None
    memory_gb: float | None = None  # GiB, the peak
    steps: int | None = None

    @property
    def best(self) -> float | None:
        """The validation loss that jobs are compared by."""
        return self.val_loss if self.best_val_loss is None else self.best_val_loss

    @property
    def order(self) -> tuple[int, bool, float, bool, float]:
        """The place in a table: best first, what has no validation behind that by its training loss, failed last."""
        best, train = self.best, self.train_loss
        rank = RANKS.get(self.status, _LAST + (self.status == NOT_RUN))
        return rank, best is None, best or 0.0, train is None, train or 0.0


def read(folder: Path) -> list[Job]:
    """Return the jobs in a sweep's folder, best first: every one that is there, and those that the plan still lacks.

    A job of an earlier sweep in the same folder is among them. Raises OSError if the folder cannot be read.
    """
    jobs = [_job(folder, path) for path in folders(folder)]
    ran = {frozenset(job.words) for job in jobs}
    plan: Any = None
    with suppress(OSError, ValueError):
        plan = json_file.read(folder / sweep_plan.NAME)
    missing = [words for words in sweep_plan.jobs_of(plan) if frozenset(words) not in ran]
    jobs += [Job(folder=None, words=tuple(words), status=NOT_RUN) for words in missing]
    return sorted(jobs, key=lambda job: job.order)


def folders(top: Path) -> list[Path]:
    """Return the folders of jobs below `top`: a job's folder holds no other job. Raises OSError for `top` alone."""
    return list(_walk(top))


def _walk(top: Path) -> Iterator[Path]:
    os.listdir(top)
    for seen, (place, below, files) in enumerate(os.walk(top)):
        path = Path(place)
        if seen >= _MOST_FOLDERS:
            return
        if path != top and ({SUMMARY, METRICS} & set(files) or HYDRA in below):
            below.clear()
            yield path
        elif len(path.relative_to(top).parts) >= _DEEPEST:
            below.clear()
        below.sort(key=lambda name: (not name.isdecimal(), len(name) if name.isdecimal() else 0, name))


def _job(top: Path, path: Path) -> Job:
    name = str(path.relative_to(top))
    found: Any = None
    note = "no summary.json: it was killed, or still runs"
    if os.path.lexists(path / SUMMARY):
        try:
            found = json_file.read(path / SUMMARY)
        except (OSError, ValueError) as error:
            note = f"summary.json cannot be read: {error}"
    if not isinstance(found, dict):
        return Job(folder=name, words=words_of(path), status=UNFINISHED, message=note)
    status, words = found.get("status"), found.get("overrides")
    steps = found.get("steps")
    return Job(
        folder=name,
        words=tuple(words) if words and sweep_plan.is_words(words) else words_of(path),
        status=status if isinstance(status, str) and status in RANKS else UNFINISHED,
        message=_message(found),
        val_loss=_number(found, "last_val_loss"),
        best_val_loss=_number(found, "best_val_loss"),
        train_loss=_number(found, "last_train_loss"),
        tokens_per_second=_number(found, "tokens_per_second"),
        memory_gb=_number(found, "peak_memory_gb"),
        steps=steps if type(steps) is int and 0 <= steps < 2**63 else None,
    )


def _message(found: dict[str, Any]) -> str:
    """Return why it ended, and what ran instead of what was asked for."""
    precision, message = found.get("precision"), found.get("message")
    told = [cause for cause in str(message or "").splitlines()[:1] if cause and isinstance(message, str)]
    told = [cause.removeprefix("error: ") for cause in told]
    if isinstance(precision, dict) and isinstance(precision.get("reason"), str) and precision["reason"]:
        told.append(f"ran {precision.get('ran')}: {precision['reason']}")
    return "; ".join(told)


def _number(found: dict[str, Any], key: str) -> float | None:
    value = found.get(key)
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def words_of(path: Path) -> tuple[str, ...]:
    """Return the overrides that Hydra has written for a job; none if that file is missing or is none of Hydra's."""
    words: Sequence[Any] = ()
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        file = path / HYDRA / "overrides.yaml"
        if file.stat().st_size <= _LARGEST_YAML:
            words = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tuple(words) if sweep_plan.is_words(words) else ()
