"""`summary.json`: what a run was, how it ended, and its results. Written at every end, good or bad."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from gpt2_fp8 import __version__
from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.schema import PlainPrecisionConfig, RunConfig
from gpt2_fp8.runtime.programs import source_digest

NAME = "summary.json"
Status = Literal["completed", "stopped", "failed", "diverged", "refused", "data_lost", "interrupted"]


@dataclass(kw_only=True)
class Precision:
    """What was asked for, what ran, and why the two differ (None: they do not)."""

    asked: str
    ran: str | None = None
    reason: str | None = None
    last_in_bf16: int = 0  # steps before the end that computed in bf16 in a run in FP8 (precision.bf16_last_steps)


@dataclass(kw_only=True)
class Checkpoints:
    """Paths of the two checkpoints that matter; None if there is none."""

    last: str | None = None
    best: str | None = None


@dataclass(kw_only=True)
class DivergenceReport:
    """What went wrong in steps of the whole run, and what was done: see `engine/divergence.py`."""

    events: list[dict[str, Any]] = field(default_factory=list)  # step, what, reason
    reruns: int = 0  # steps run again in bf16
    skipped: int = 0  # steps whose update was skipped even after the rerun
    rollbacks: int = 0


@dataclass(kw_only=True)
class Summary:
    """A run, as `summary.json` describes it. The run fills it as it goes; `finish` and `write` end it.

    Until `finish` is called its status is "failed", so that a summary of an unexpected end never reads as success.
    """

    tags: dict[str, Any] = field(default_factory=dict)  # from `+tags.KEY=VALUE`
    notes: str | None = None
    precision: Precision
    recipe: str | None  # the scaling recipe; None if nothing ran in FP8
    optimizer: str = "adamw"
    status: Status = "failed"
    exit_code: int = 1
    message: str = ""
    ended_by: str | None = None  # the key of the limit that ended it: trainer.max_steps, ...; None: something else did
    started: str = field(default_factory=lambda: _now())
    ended: str | None = None
    duration_s: float | None = None
    steps: int = 0  # optimizer steps of the whole run, including those before a resume
    tokens: int = 0  # of these steps
    last_train_loss: float | None = None
    last_val_loss: float | None = None
    best_val_loss: float | None = None
    best_val_loss_step: int | None = None
    tokens_per_second: float | None = None  # the median over this process's steps
    peak_memory_gb: float | None = None  # allocated on the GPU; on a CPU resident of the process
    training_memory_gb: float | None = None  # the GPU's peaks of training and validation, separately
    validation_memory_gb: float | None = None
    checkpoint_stall_seconds: float | None = None  # the longest of this process; None if no checkpoint was taken
    skipped_steps: int = 0
    divergence: DivergenceReport = field(default_factory=DivergenceReport)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    data: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)  # the layers, and the kernels of the fused ones by part
    overrides: list[str] = field(default_factory=list)  # the words of this run or of its job in a sweep
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration, as plain values
    versions: dict[str, str | None] = field(default_factory=lambda: versions())
    device: str | None = None
    command: list[str] = field(default_factory=lambda: list(sys.argv))

    def __post_init__(self) -> None:
        self._began = time.monotonic()  # the wall clock may be set back meanwhile

    @classmethod
    def of(cls, config: RunConfig, words: Sequence[str]) -> Summary:
        """Return that of a run that begins. `words`: its overrides."""
        summary = cls(precision=Precision(asked=config.precision.name), recipe=None)
        summary.tags, summary.notes, summary.overrides = config.tags, config.notes, list(words)
        summary.take_settings(config)
        return summary

    def take_settings(self, config: RunConfig) -> None:
        """Note the final settings."""
        self.recipe = None if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name
        self.optimizer, self.config = config.optimizer.name, asdict(config)

    def finish(self, error: BaseException | None = None) -> int:
        """Note how the run ended: `error`, or None if it ended well. Returns the process's exit code."""
        self.ended = _now()
        self.duration_s = time.monotonic() - self._began
        if error is None:
            self.status, self.exit_code, self.message = "completed", 0, ""
        elif isinstance(error, RunError):
            self.status, self.exit_code, self.message = error.status, error.exit_code, str(error)  # type: ignore[assignment]
        elif isinstance(error, KeyboardInterrupt):
            self.status, self.exit_code, self.message = "interrupted", 130, "interrupted before it could save"
        else:
            self.status, self.exit_code, self.message = "failed", 1, f"{type(error).__name__}: {error}"
        return self.exit_code

    def take_over(self, folder: Path) -> None:
        """Copy from the summary in `folder` what a process without a step cannot know. Raises nothing."""
        if self.tokens_per_second is None:
            before = read(folder)
            self.tokens_per_second = before.get("tokens_per_second")
            self.checkpoint_stall_seconds = self.checkpoint_stall_seconds or before.get("checkpoint_stall_seconds")
            self.last_train_loss = self.last_train_loss or before.get("last_train_loss")

    def write(self, folder: Path) -> Path:
        """Replace `folder/summary.json` atomically and return its path; non-finite floats become null.

        Raises OSError.
        """
        path = Path(folder) / NAME
        durable.write_json(path, _finite(asdict(self)))
        return path


def read(folder: Path) -> dict[str, Any]:
    """Return the summary in a run's folder, as plain values; empty if there is none that can be read."""
    with suppress(OSError, ValueError):
        found = disk.read_json(folder / NAME)
        return found if isinstance(found, dict) else {}
    return {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """Return versions as installed, without importing anything; None for what is not installed.

    `code` is the digest of this package's files.
    """
    found: dict[str, str | None] = {"gpt2_fp8": __version__, "code": source_digest()}
    found["python"] = platform.python_version()
    for name in ("torch", "lightning", "transformer_engine"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
