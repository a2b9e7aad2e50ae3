"""Results as tables: rows as aligned text or Markdown, and the rows of a benchmark's cases."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure.case import WAITS, Case, Kernel, Result

Row = dict[str, Any]
_TITLES = {"mfu_bf16": "mfu_bf16", "losses": "loss"}
_NUMBER = re.compile(r"[-+]?[\d.,]+( ?[-x%] ?[\d.,]*)?|nan|[-+]?inf")


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
    def layers(self) -> str | None:
        """The layers that ran."""
        return self.result.layers


def baseline(measured: Measured, others: Sequence[Measured]) -> Measured | None:
    """Return the case to compare with: bf16 on the same work, preferably compiled; None if not measured."""
    found = [
        other
        for other in others
        if other.work == measured.work and other.config.precision.name == "bf16" and other.result.ran == "bf16"
    ]
    found = [other for other in found if other.result.tokens_per_second]
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
            "layers": measured.layers,
            "attention": result.attention if config.attention != "auto" else "",
            "tokens/s": _form(result.tokens_per_second, ",.0f"),
            "slowest": _form(result.slowest, ",.0f"),
            "fastest": _form(result.fastest, ",.0f"),
            "x bf16": "" if config.notes else _form(ratio(measured, every), ".3f"),
            "x first": _form(times(measured, every[0]), ".3f") if config.notes else "",
            "x before": _form(times(measured, every[max(0, place - 1)]), ".3f") if config.notes and place else "",
            "mfu_bf16": _form(result.mfu_bf16, ".3f"),
            "GiB": _form(result.peak_memory_gb, ".1f"),
            f"loss, step {measured.case.warmup + measured.case.steps}": _form(
                result.losses[-1] if result.losses else None, ".4f"
            ),
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


def text(rows: Sequence[Row], verbatim: bool = False) -> str:
    """Format rows as columns of text, numbers right-aligned; columns without values are left out.

    `verbatim`: titles are as they are, since they name a run's keys.
    """
    names, cells, right = _columns(rows, verbatim)
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)] if cells else []
    lines = [names, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    )


def markdown(rows: Sequence[Row], verbatim: bool = False) -> str:
    """Format rows as a Markdown table; `verbatim` as in `text`."""
    names, cells, right = _columns(rows, verbatim)
    names = [name.replace("|", "\\|") for name in names]
    lines = [names, ["---:" if r else "---" for r in right], *[[c.replace("|", "\\|") for c in row] for row in cells]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns(rows: Sequence[Row], verbatim: bool) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return titles, cells, and which columns are right-aligned."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if any(_cell(r.get(key)) for r in rows)]
    keys = [key for key in keys if key != "status" or any(row.get(key) != "ok" for row in rows)]
    keys.sort(key="message".__eq__)  # moved to the end
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    columns: list[tuple[str, ...]] = list(zip(*cells, strict=True))
    right = [all(_NUMBER.fullmatch(cell) for cell in column if cell) for column in columns]
    return [key if verbatim else _TITLES.get(key, key.replace("_", " ")) for key in keys], cells, right


def _cell(value: object) -> str:
    """Format one value. A list is shown by its last."""
    if isinstance(value, (list, tuple)):
        value = value[-1] if value else None
    if value is None or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    return f"{value:,}" if isinstance(value, int) else " ".join(str(value).split())


def _number(value: float) -> str:
    """Format a number with at least four significant digits."""
    size = abs(value)
    if not math.isfinite(value) or size == 0:
        return f"{value:g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.{max(1, 3 - math.floor(math.log10(size)))}f}"


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _note(result: Result, asked: str) -> str:
    if result.status != "ok":
        return why_not(result)
    return f"ran {result.ran}: {result.reason}" if result.reason and result.ran != asked else ""
