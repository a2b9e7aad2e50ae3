"""The runs of a study: where each is, what it has come to, and the command of what is left of it."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import Leg, folder_name

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config import bounded
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.train import metrics_csv

START = "start"  # the name of the runs that others begin from
_CADENCE = "callbacks.checkpoint_every_n_steps"
_PARTS = 10  # of a run, each of which ends with a checkpoint, unless the words say how often there is one
_SAID = 64 * 1024  # bytes at the end of a process's output, in which its error is looked for


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
        """The run's figure; None unless the run is done, in the precision that was asked for, and it is finite."""
        found = self._figure(self._summary())
        return found if found is not None and math.isfinite(found) else None

    @property
    def trained(self) -> bool:
        """Whether the run came to its end, in the precision that was asked for."""
        return self._is_trained(self._summary())

    @property
    def told(self) -> str:
        """How a run that is done is told."""
        return f"{self.loss:.4f}"

    @property
    def fell_back(self) -> str | None:
        """In what the run has computed instead of the precision that was asked for, and why; None: it has not."""
        return _fell_back(self._summary())

    @property
    def made_by(self) -> dict[str, str | None]:
        """What the run's last process ran on: its `code` (a digest), `torch` and `device`.

        A run in FP8 that was not told in what to validate has its `validation` too, where the figure is of one: the
        default of `precision.evaluation` was FP8 once.
        """
        found = self._summary()
        versions = found.get("versions")
        versions = versions if isinstance(versions, dict) else {}
        made_by = {"code": versions.get("code"), "torch": versions.get("torch"), "device": found.get("device")}
        return made_by | ({"validation": validated} if (validated := self.validated_in) is not None else {})

    @property
    def validated_in(self) -> str | None:
        """In what a run in FP8 was validated by default: "fp8" or "bf16".

        None: it is in another precision, its words say in what, or its figure is no validation's.
        """
        typed = any(word.startswith("precision.evaluation=") for leg in self.legs for word in (*self.words, *leg.words))
        found = {} if typed else self._summary()
        ran, config = (part if isinstance(part, dict) else {} for part in (found.get("precision"), found.get("config")))
        precision = config.get("precision")
        if self.after is not None or not str(ran.get("ran")).startswith("fp8") or not isinstance(precision, dict):
            return None
        return str(precision.get("evaluation", FP8PrecisionConfig.evaluation))

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
        words = *self.words, *leg.words, *leg.added, *own, *self._cadence(leg), "callbacks.progress_bar=false"
        return [sys.executable, "-m", "gpt2_fp8.run", *words]

    def _cadence(self, leg: Leg) -> list[str]:
        """Return the word for a checkpoint in each part of the run: what is killed loses no more than that."""
        typed = any(word.partition("=")[0] in ("callbacks", _CADENCE) for word in (*self.words, *leg.words))
        return [] if typed else [f"{_CADENCE}={max(1, self.steps // _PARTS)}"]

    def why_failed(self, code: int) -> str:
        """Say why the run is not done after its process has ended with `code`, as far as it has said so itself."""
        found = self._summary()
        said = str(found.get("message") or "").partition("\n")[0] if code and found.get("exit_code") == code else ""
        figure = self._figure(found)
        what = "without a figure" if figure is None else f"and its figure is {figure}"
        ended = "" if code else f"it ended at step {self.step} of {self.steps}, {what}"
        reason = _fell_back(found) or said.removeprefix("error: ") or ended or self._last_error()
        return ": ".join(filter(None, ["failed", reason])) + f"; see {self.folder / 'output.txt'}"

    def _last_error(self) -> str:
        """Return the last error in the output: one that refuses to begin is in no summary. "" if there is none."""
        try:
            with (self.folder / "output.txt").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _SAID))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")

    def _figure(self, summary: dict[str, Any]) -> float | None:
        """Return the figure of a run that is trained, which may not be finite; None: it is not, or has none."""
        if not self._is_trained(summary):
            return None
        return summary.get("last_val_loss") if self.after is None else self._mean_loss(self.after)

    def _mean_loss(self, after: int) -> float | None:
        """Return the mean training loss of the steps after `after`; None without a row. A row is a mean of its steps.

        The first row of a process is of one step, so rows weigh as much as their steps.
        """
        rows = metrics_csv.read(self.folder / "metrics.csv", ["train_loss"]).rows
        begin = self.start.steps if self.start else 0
        before = [begin, *(row["step"] for row in rows)]
        steps = [
            (row["step"] - was, row["train_loss"])
            for was, row in zip(before, rows, strict=False)
            if after < row["step"] <= self.steps
        ]
        return sum(count * loss for count, loss in steps) / sum(count for count, _ in steps) if steps else None

    def _is_trained(self, summary: dict[str, Any]) -> bool:
        return self._ended(summary) and _fell_back(summary) is None

    def _ended(self, summary: dict[str, Any]) -> bool:
        """Return whether the run came to its end. A window of steps can be read from a longer run as well."""
        steps = summary.get("steps")
        longer = self.after is not None and isinstance(steps, int) and steps > self.steps
        return summary.get("status") == "completed" and (steps == self.steps or longer)

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


def _fell_back(summary: dict[str, Any]) -> str | None:
    found = summary.get("precision")
    found = found if isinstance(found, dict) else {}
    asked, ran, reason = (found.get(key) for key in ("asked", "ran", "reason"))
    return None if ran is None or asked in (ran, "auto") else f"{ran} instead of {asked}: {reason}"
