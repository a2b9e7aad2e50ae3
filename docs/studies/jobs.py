"""The runs of a study: where each is, what it has come to, and the command of what is left of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rows import Leg, folder_name

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import bounded, pointers
from gpt2_fp8.train import metrics_csv

START = "start"  # the name of the runs that others begin from


@dataclass(frozen=True)
class Job:
    """One run of a study: a condition with one seed, of `steps` optimizer steps.

    `after`: its figure is the mean training loss of the steps after this one; None: the last validation loss.
    `start`: the run from whose last checkpoint it begins; None: it begins with step 1.
    """

    study: Path
    name: str
    seed: int
    legs: tuple[Leg, ...]
    words: tuple[str, ...]
    steps: int
    after: int | None = None
    start: Start | None = None

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.study / folder_name(self.name) / f"seed-{self.seed}"

    @property
    def done(self) -> bool:
        """Whether the run has what it is for."""
        return self.loss is not None

    @property
    def loss(self) -> float | None:
        """The run's figure; None unless the run is done, in the precision that was asked for."""
        if not self.trained:
            return None
        if self.after is None:
            return self._summary().get("last_val_loss")
        rows = metrics_csv.read(self.folder / "metrics.csv", ["train_loss"]).rows
        found = [row["train_loss"] for row in rows if self.after < row["step"] <= self.steps]
        return fmean(found) if found else None

    @property
    def trained(self) -> bool:
        """Whether the run came to its end, in the precision that was asked for."""
        return self._ended() and self.fell_back is None

    @property
    def told(self) -> str:
        """How a run that is done is told."""
        return f"{self.loss:.4f}"

    @property
    def fell_back(self) -> str | None:
        """In what the run has computed instead of the precision that was asked for, and why; None: it has not."""
        found = self._summary().get("precision")
        found = found if isinstance(found, dict) else {}
        asked, ran, reason = (found.get(key) for key in ("asked", "ran", "reason"))
        return None if ran is None or asked in (ran, "auto") else f"{ran} instead of {asked}: {reason}"

    @property
    def began(self) -> bool:
        """Whether it has a checkpoint of its own."""
        return any(self.folder.glob("checkpoints/*/manifest.json"))

    @property
    def step(self) -> int:
        """The optimizer step that it goes on from."""
        checkpoints = self.folder / "checkpoints"
        if last := pointers.read(checkpoints, "last"):
            return last.step
        return max(pointers.steps(checkpoints), default=self.start.steps if self.start else 0)

    def goes_on(self, step: int) -> bool:
        """Return whether a process that went on from `step`, and has ended well, has left another leg."""
        return step < self.step < self.steps

    def command(self) -> list[str]:
        """Return the command of the leg that is next, which continues what is there."""
        leg = next((leg for leg in self.legs if leg.until is None or self.step < leg.until), self.legs[-1])
        last = "last" if self.start is None or self.began else compose.quoted(str(self.start.checkpoint))
        own = f"hydra.run.dir={compose.quoted(str(self.folder))}", f"seed={self.seed}", f"ckpt_path={last}"
        words = *self.words, *leg.words, *leg.added, *own, "callbacks.progress_bar=false"
        return [sys.executable, "-m", "gpt2_fp8.run", *words]

    def why_failed(self, code: int) -> str:
        """Say why the run is not done after its process has ended with `code`, as far as it has said so itself."""
        found = self._summary()
        said = str(found.get("message") or "").partition("\n")[0] if code and found.get("exit_code") == code else ""
        ended = "" if code else f"it ended at step {self.step} of {self.steps}, without a figure"
        reason = self.fell_back or said.removeprefix("error: ") or ended
        return ": ".join(filter(None, ["failed", reason])) + f"; see {self.folder / 'output.txt'}"

    def _ended(self) -> bool:
        """Return whether the run came to its end. A window of steps can be read from a longer run as well."""
        found = self._summary()
        steps = found.get("steps")
        longer = self.after is not None and isinstance(steps, int) and steps > self.steps
        return found.get("status") == "completed" and (steps == self.steps or longer)

    def _summary(self) -> dict[str, Any]:
        try:
            found = bounded.read_json(self.folder / "summary.json")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Start(Job):
    """A run from whose last checkpoint the others of its seed begin. It has no figure."""

    @property
    def checkpoint(self) -> Path:
        """The folder of its last step."""
        return self.folder / "checkpoints" / pointers.folder_name(self.steps)

    @property
    def done(self) -> bool:
        """Whether the others can begin."""
        return self.trained and (self.checkpoint / "manifest.json").is_file()

    @property
    def told(self) -> str:
        """How a start that is done is told."""
        return f"done, at step {self.steps}"
