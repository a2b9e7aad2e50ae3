"""What a benchmark writes: `bench.json` and `bench.md` in its folder, and the tables that it prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import table
from gpt2_fp8.measure.case import WAITS, Case, Kernel, Result

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A case and its result."""

    case: Case
    result: Result

    @property
    def config(self) -> RunConfig:
        """The configuration that was trained."""
        return self.case.config

    @property
    def work(self) -> tuple[str, int]:
        """Model and micro-batch: cases with the same work can be compared."""
        return self.config.model.name, self.config.micro_batch

    @property
    def recipe(self) -> str | None:
        """The scaling recipe that was asked for; None if the precision has none."""
        return self.config.recipe.name if self.config.precision.name.startswith("fp8") else None

    @property
    def name(self) -> str:
        """What tells it from others with the same work; of `bench.rows`, the row's name."""
        words = [self.config.precision.name, self.recipe, self.result.layers]
        return self.config.notes or ", ".join(filter(None, words))


def baseline(measured: Measured, others: Sequence[Measured]) -> Measured | None:
    """Return the case to compare with: bf16 on the same work, preferably compiled; None if not measured."""
    same = [other for other in others if other.work == measured.work and other.result.tokens_per_second]
    found = [other for other in same if other.config.precision.name == other.result.ran == "bf16"]
    return max(found, key=lambda other: bool(other.result.compiled), default=None)


def ratio(measured: Measured, others: Sequence[Measured]) -> float | None:
    """Compute tokens per second relative to the baseline's; None without a baseline."""
    base = baseline(measured, others)
    return None if base is None else times(measured, base)


def times(measured: Measured, base: Measured) -> float | None:
    """Compute tokens per second relative to those of `base`; None if one of them has no figure."""
    own, other = measured.result.tokens_per_second, base.result.tokens_per_second
    return None if own is None or not other else own / other


def case_rows(every: Sequence[Measured]) -> list[Row]:
    """Return a row for each case; a note says what went wrong, or what ran instead.

    A case of `bench.rows` has its name, and its ratios are to the first row and to the row before.
    """
    rows = []
    for place, measured in enumerate(every):
        config, result = measured.config, measured.result
        micro_batches = config.global_batch_size // config.micro_batch
        row: Row = {"row": config.notes} if config.notes else {}
        row |= {
            "model": config.model.name,
            "micro-batch": f"{config.micro_batch} x {micro_batches}",
            "precision": config.precision.name,
            "recipe": measured.recipe,
            "optimizer": "" if config.optimizer.name == "adamw" else config.optimizer.name,
            "layers": result.layers,
            "attention": result.attention if config.attention != "auto" else "",
            "tokens/s": _form(result.tokens_per_second, ",.0f"),
            "slowest": _form(result.slowest, ",.0f"),
            "fastest": _form(result.fastest, ",.0f"),
            "x bf16": "" if config.notes else _form(ratio(measured, every), ".3f"),
            "x first": _form(times(measured, every[0]), ".3f") if config.notes else "",
            "x before": _form(times(measured, every[max(0, place - 1)]), ".3f") if config.notes and place else "",
            "mfu_bf16": _form(result.mfu_bf16, ".3f"),
            "GiB": _form(result.peak_memory_gb, ".1f"),
            f"loss, step {len(result.losses)}": _form(result.losses[-1] if result.losses else None, ".4f"),
            "note": _note(result, config.precision.name),
        }
        rows.append(row)
    return rows


def why_not(result: Result) -> str:
    """Say why a case has no figures, and what the user can do about it."""
    why = f"{result.status}: {result.message}" if result.message else result.status
    return f"{why} (fix: {result.remedy})" if result.remedy else why


def kernel_rows(result: Result, count: int = 15) -> list[Row]:
    """Return rows of the kernels that a step's time goes to, the longest first, and what a GPU waits between them."""
    kernels = [kernel for kernel in result.profile if kernel.name != WAITS]
    rows = [_kernel_row(k.name, [k]) for k in kernels[:count]]
    if rest := kernels[count:]:
        rows.append(_kernel_row(f"{len(rest)} others", rest))
    return rows + [_kernel_row(WAITS, [k]) for k in result.profile if k.name == WAITS]


def _kernel_row(name: str, kernels: Sequence[Kernel]) -> Row:
    time, share, calls = (sum(getattr(k, of) for k in kernels) for of in ("milliseconds", "share", "calls"))
    return {"ms": f"{time:.3f}", "share": f"{share:.1%}", "calls": calls, "kernel": name}


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _note(result: Result, asked: str) -> str:
    if result.status != "ok":
        return why_not(result)
    return f"ran {result.ran}: {result.reason}" if result.reason and result.ran != asked else ""


@dataclass
class Record:
    """A benchmark's settings by key, and the results so far."""

    folder: Path
    bench: dict[str, Any]
    command: str  # that measures the same again
    cases: list[Measured] = field(default_factory=list)
    complete: bool = False
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def device(self) -> str | None:
        """The device that was measured, once a case has named it."""
        return next((m.result.device for m in self.cases if m.result.device), None)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries that the cases used."""
        return next((m.result.versions for m in self.cases if m.result.versions), {})

    def tables(self) -> dict[str, list[Row]]:
        """Return every table by its title: the cases and their profiles."""
        found = {"Training steps": case_rows(self.cases)} if self.cases else {}
        for measured in self.cases:
            if rows := kernel_rows(measured.result):
                model, size = measured.work
                found[f"Kernels of a step: {model}, micro-batch {size} ({measured.name})"] = rows
        return found

    def write(self) -> None:
        """Replace `bench.json` and `bench.md` with the results so far. Raises OSError."""
        durable.write_json(self.folder / "bench.json", _finite(self._as_dict()))
        about = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"`{self.command}`", f"{self.device}; {about}" if self.device else ""]
        parts += [f"## {title}\n\n{table(rows)}" for title, rows in self.tables().items() if rows]
        durable.write_text(self.folder / "bench.md", "\n\n".join(filter(None, parts)) + "\n")

    def _as_dict(self) -> dict[str, Any]:
        cases = []
        for measured in self.cases:
            ratios = {"ratio_to_bf16": ratio(measured, self.cases)}
            if measured.config.notes:  # a row of `bench.rows`
                ratios = {"ratio_to_first": times(measured, self.cases[0])}
            cases.append({**asdict(measured.case), "result": asdict(measured.result), **ratios})
        return {
            "command": self.command, "started": self.started,
            "complete": self.complete, "device": self.device, "versions": self.versions, "bench": self.bench,
            "cases": cases,
        }  # fmt: skip


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
