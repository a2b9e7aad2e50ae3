"""A run that is compared with others, as its folder tells: settings, end, losses, speed, text samples.

The folder may be a stranger's. Only regular files of bounded size are read, and no link is followed. A value of
another form than a run writes counts as missing.

Samples are read from `run.log`. TensorBoard's event files hold them too, but only if that logger was on, and its reader
keeps ten of them.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2_fp8.config import json_file
from gpt2_fp8.reports import curves, unfinished
from gpt2_fp8.reports.curves import Curve
from gpt2_fp8.train import metrics_csv

WANTED = {
    *("train_loss", "val_loss", "tokens", "tokens_per_second", "step_time", "data_wait", "mfu_bf16", "memory_gb"),
    *("grad_norm", "clip_ratio", "skipped_steps", "bf16_reruns"),
}
_SAMPLE = re.compile(r"^\[[0-9:]{8}\] sample at step ([0-9]{1,12}): (.*)$")
_LARGEST_LOG = 1 << 28  # bytes
_LONGEST_LINE = 1 << 16  # bytes
_DEEPEST = 6  # levels of keys in the configuration
_MOST_SETTINGS = 5_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run. A figure is None if the run did not reach it, or does not say."""

    folder: Path
    name: str  # as it is shown
    settings: dict[str, Any]  # the resolved configuration by dotted keys
    status: str
    message: str
    asked: str | None  # the precision that was asked for
    ran: str | None  # and that ran
    reason: str | None  # why the two differ
    layers: str | None
    device: str | None
    transformer_engine: str | None  # its version
    steps: int
    skipped_steps: int
    reruns: int  # steps that were run again in bf16
    rollbacks: int
    saved: bool  # a checkpoint
    event_file: bool  # of TensorBoard
    memory_gb: float | None  # GiB, the peak
    curve: Curve
    samples: dict[int, str]  # by step
    notes: tuple[str, ...] = ()

    @property
    def seed(self) -> str:
        """What distinguishes repetitions: the seed, and the seed of the text if it is another."""
        own, text = self.settings.get("seed"), self.settings.get("data.seed")
        return f"{own}" if text in (None, own) else f"{own} (text {text})"

    @property
    def fp8(self) -> bool:
        """Whether it has computed in FP8."""
        return (self.ran or "").startswith("fp8")

    @property
    def resumed(self) -> bool:
        """Whether it was continued from a checkpoint."""
        return self.curve.resumes > 0 or self.settings.get("ckpt_path") is not None


def read(folder: Path, name: str) -> Run:
    """Return the run in `folder`. Raises ValueError, with the reason, if it cannot be compared."""
    found = _summary(folder)
    settings = dict(_flat(_part(found, "config")))
    if not settings:
        raise ValueError("its summary.json holds no configuration")
    rows = metrics_csv.read(folder / "metrics.csv", WANTED)
    notes = [f"metrics.csv is damaged ({rows.damage}): what can be read of it is compared"] if rows.damage else []
    if found.get("status") == unfinished.STATUS:
        found |= unfinished.counts(rows.rows)
        notes.append(unfinished.NOTE)
    precision, divergence = _part(found, "precision"), _part(found, "divergence")
    curve = curves.of(rows.rows)
    if not curve.losses:
        why = rows.damage or f"the run's status is {_text(found, 'status')}"
        raise ValueError(f"metrics.csv has no training loss ({why})")
    return Run(
        folder=folder, name=name, settings=settings, status=_text(found, "status") or "unknown",
        message=_text(found, "message") or "", asked=_text(precision, "asked"), ran=_text(precision, "ran"),
        reason=_text(precision, "reason"), layers=_text(_part(found, "kernels"), "layers"),
        device=_text(found, "device"), transformer_engine=_text(_part(found, "versions"), "transformer_engine"),
        steps=_count(found, "steps"), skipped_steps=_count(found, "skipped_steps"),
        reruns=_count(divergence, "reruns"), rollbacks=_count(divergence, "rollbacks"),
        saved=bool(_text(_part(found, "checkpoint"), "last")), event_file=_has_events(folder / "tensorboard"),
        memory_gb=_memory(found, rows.rows), curve=curve, samples=dict(_samples(folder / "run.log")),
        notes=tuple(notes),
    )  # fmt: skip


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not os.path.lexists(path):
        return unfinished.summary(folder, _lines(folder / "run.log"))
    try:
        found = json_file.read(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"summary.json cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("summary.json is not a run's")
    return found


def _flat(part: dict[str, Any], above: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested configuration under their dotted keys; lists as they are written."""
    for place, (key, value) in enumerate(part.items()):
        if place >= _MOST_SETTINGS:
            return
        if isinstance(value, dict) and value and depth < _DEEPEST:
            yield from _flat(value, f"{above}{key}.", depth + 1)
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield f"{above}{key}", value
        else:
            yield f"{above}{key}", str(value)


def _samples(path: Path) -> Iterator[tuple[int, str]]:
    """Yield step and text of the samples in a log. A resumed run may have logged a step again: the last one counts."""
    for line in _lines(path):
        if found := _SAMPLE.match(line):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                text = ast.literal_eval(found[2])
                if isinstance(text, str):
                    yield int(found[1]), text


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log, as many as may be read of it; none if it is no regular file."""
    with suppress(OSError), open(path, "rb") as file:
        left = _LARGEST_LOG
        while left > 0 and (line := file.readline(_LONGEST_LINE)):
            left -= len(line)
            yield line.decode("utf-8", "replace").rstrip("\n")


def _has_events(folder: Path) -> bool:
    with suppress(OSError):
        return any(
            entry.name.startswith("events.out.tfevents") and entry.stat(follow_symlinks=False).st_size > 0
            for entry in os.scandir(folder)
        )
    return False


def _memory(found: dict[str, Any], rows: list[dict[str, float]]) -> float | None:
    peak = found.get("peak_memory_gb")
    if isinstance(peak, float):
        return peak
    return max((row["memory_gb"] for row in rows if "memory_gb" in row), default=None)


def _part(found: dict[str, Any], key: str) -> dict[str, Any]:
    part = found.get(key)
    return part if isinstance(part, dict) else {}


def _text(found: dict[str, Any], key: str) -> str | None:
    value = found.get(key)
    return value if isinstance(value, str) else None


def _count(found: dict[str, Any], key: str) -> int:
    value = found.get(key)
    return value if type(value) is int and 0 <= value < 2**63 else 0
