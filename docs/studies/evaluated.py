"""Runs whose figure is the loss of their last weights in another precision, as `--evaluate bf16` asks for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import Job

from gpt2_fp8 import compose
from gpt2_fp8.config import bounded


@dataclass(frozen=True)
class Evaluated(Job):
    """A run that is evaluated after its end, by a process of its own. `precision`: bf16 or fp32."""

    precision: str = "bf16"

    def _figure(self, summary: dict[str, Any]) -> float | None:
        """Return the loss of the last weights in `precision`; None unless the run is trained, and evaluated in it."""
        if not self._is_trained(summary):
            return None
        try:
            found = bounded.read_json(self._results)
        except (OSError, ValueError):
            return None
        same = isinstance(found, dict) and found.get("precision") == self.precision
        return found.get("loss") if same else None

    def command(self) -> list[str]:
        """Return the command of what is next: a leg, or the evaluation."""
        if not self.trained:
            return super().command()
        words = f"ckpt_path={compose.quoted(str(self.folder))}", f"precision={self.precision}"
        return [sys.executable, "-m", "gpt2_fp8.evaluate", *words, f"out={compose.quoted(str(self._results))}"]

    def goes_on(self, step: int) -> bool:
        """Return whether a process that began at `step` has left something for another one."""
        return super().goes_on(step) or (self.trained and step < self.step)

    @property
    def validated_in(self) -> None:
        """None: every run of the table is evaluated in `precision`."""

    @property
    def _results(self) -> Path:
        return self.folder / f"evaluated-{self.precision}.json"
