"""What a benchmark writes: `bench.json`, `bench.md` and `bench.png` in its folder."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config.shown import line
from gpt2_fp8.measure import table
from gpt2_fp8.measure.table import Measured, Row


def plot(every: Sequence[Measured], path: Path) -> bool:
    """Write a PNG with a bar for each case. Returns False if there is nothing to draw.

    There is a group of bars for each model and micro-batch, and a colour for each precision, recipe and family of
    layers. Thin lines go from the slowest to the fastest step. Raises ImportError if matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays

    done = [measured for measured in every if measured.result.tokens_per_second]
    if not done:
        return False
    works = list(dict.fromkeys(measured.work for measured in done))
    kinds = list(dict.fromkeys(_kind(measured) for measured in done))
    width = 0.8 / len(kinds)
    figure = Figure(figsize=(max(6.0, 1.5 + 0.7 * len(works) * len(kinds)), 4.5), layout="constrained")
    axes = figure.subplots()
    for place, kind in enumerate(kinds):
        group = [measured for measured in done if _kind(measured) == kind]
        x = [works.index(measured.work) + (place - (len(kinds) - 1) / 2) * width for measured in group]
        rates = [measured.result.tokens_per_second or 0.0 for measured in group]
        below = [max(0.0, rate - (m.result.slowest or rate)) for rate, m in zip(rates, group, strict=True)]
        above = [max(0.0, (m.result.fastest or rate) - rate) for rate, m in zip(rates, group, strict=True)]
        bars = axes.bar(x, rates, width * 0.95, yerr=[below, above], capsize=3, label=kind)
        axes.bar_label(
            bars, labels=[_thousands(rate) for rate in rates], label_type="center", fontsize=8
        )  # clear of the lines
    axes.set_xticks(range(len(works)), [f"{model}\nmicro-batch {size}" for model, size in works])
    axes.set_ylabel("tokens per second")
    axes.set_title(f"full training steps on {done[0].result.device}", fontsize=10)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def _kind(measured: Measured) -> str:
    if measured.config.notes:  # the name of a row
        return line(measured.config.notes)
    return ", ".join(filter(None, [measured.config.precision.name, measured.recipe, measured.layers]))


def _thousands(rate: float) -> str:
    return f"{rate / 1000:,.0f} k" if rate >= 10_000 else f"{rate:,.0f}"


@dataclass
class Record:
    """A benchmark's settings by key, and the results so far."""

    folder: Path
    bench: dict[str, Any]
    program: str  # as the user types it
    words: Sequence[str]  # the words after it
    cases: list[Measured] = field(default_factory=list)
    complete: bool = False
    unwritten: OSError | None = None  # why not all files are written
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def device(self) -> str | None:
        """The device that was measured, once a case has named it."""
        return next((m.result.device for m in self.cases if m.result.device), None)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries that the cases used."""
        return next((m.result.versions for m in self.cases if m.result.versions), {})

    @property
    def command(self) -> str:
        """The command that measures the same again."""
        return shlex.join([*self.program.split(), *self.words])

    def tables(self) -> dict[str, list[Row]]:
        """Return every table by its title: the cases and their profiles."""
        found = {"Training steps": table.case_rows(self.cases)} if self.cases else {}
        for measured in self.cases:
            if rows := table.kernel_rows(measured.result):
                words = [measured.config.precision.name, measured.recipe, measured.layers]
                found[f"Kernels of a step: {name(measured)} ({', '.join(filter(None, words))})"] = rows
        return found

    def write(self) -> None:
        """Replace `bench.json` and `bench.md` with the results so far. Raises OSError."""
        durable.write_json(self.folder / "bench.json", _finite(self._as_dict()))
        about = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"`{self.command}`", f"{self.device}; {about}" if self.device else ""]
        parts += [f"## {title}\n\n{table.markdown(rows)}" for title, rows in self.tables().items() if rows]
        durable.write_text(self.folder / "bench.md", "\n\n".join(filter(None, parts)) + "\n")

    def keep(self) -> None:
        """Call `write`. If it fails, warn the first time: the results can still be shown."""
        try:
            self.write()
            self.unwritten = None
        except OSError as error:
            if self.unwritten is None:
                print(f"warning: {self.folder} cannot be written, going on: {error}", file=sys.stderr)
            self.unwritten = error

    def draw(self) -> str | None:
        """Write `bench.png`; return why it could not be drawn, or None."""
        try:
            plot(self.cases, self.folder / "bench.png")
        except ImportError:
            return 'no plot, since matplotlib is not installed: pip install -e ".[bench]"'
        except OSError as error:
            return f"no plot: {error}"
        return None

    def _as_dict(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "started": self.started,
            "complete": self.complete,
            "device": self.device,
            "versions": self.versions,
            "bench": self.bench,
            "cases": [{**asdict(m.case), "result": asdict(m.result), **self._ratios(m)} for m in self.cases],
        }

    def _ratios(self, measured: Measured) -> dict[str, float | None]:
        if measured.config.notes:  # a row of `bench.rows`
            return {"ratio_to_first": table.times(measured, self.cases[0])}
        return {"ratio_to_bf16": table.ratio(measured, self.cases)}


def name(measured: Measured) -> str:
    """Name the model and micro-batch of a case."""
    model, size = measured.work
    return f"{model}, micro-batch {size}"


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
