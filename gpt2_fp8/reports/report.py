"""A comparison as `compare.md`, `compare.html` and `compare.png`, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.reports import comparison, render
from gpt2_fp8.reports.comparison import Comparison, Row, Side
from gpt2_fp8.reports.render import Section

FILES = ("compare.md", "compare.html", "compare.png")
TITLE = "Comparison of runs"
_SECTIONS = {  # by key: the title, and what is said of the figures
    "runs": ("Runs", "Compared with {base}, up to the {tokens:,.0f} tokens that all have."),
    "verdict": ("Verdict on FP8", "By the confidence interval of the difference in loss."),
    "losses": ("Losses", "Nats a token. The interval is Welch's, at 95 %; pairs are of equal seeds. A training loss is "
               "the mean of the last {width:,.0f} tokens."),
    "equal_loss": ("Time to equal loss", "When the mean curves of a condition and of the base first came down to the "
                   "higher of their two losses at the end. Errors are standard errors over seeds (jackknife)."),
    "throughput": ("Throughput and memory", "Medians of a run's logged intervals, then means of the runs. Memory: the "
                   "peak."),
}  # fmt: skip
_FORMS = {key: form for form, keys in {
    ".4f": ("mean", "deviation", "level", "paired_error"), "+.4f": ("above_base", "paired"),
    "+.2%": ("relative", "relative_low", "relative_high"), ".0%": ("memory_of_base",), ".2f": ("times_base",),
    ",.0f": ("tokens", "base_tokens", "tokens_per_second"), ",.1f": ("seconds", "base_seconds", "memory_gb"),
    ".3f": ("tokens_ratio", "tokens_error", "seconds_ratio", "seconds_error"),
}.items() for key in keys}  # fmt: skip


def plain(found: Comparison, left_out: Sequence[str]) -> dict[str, Any]:
    """Return the comparison as plain values for JSON."""
    sides = found.sides
    return {
        "tokens": found.tokens,
        "runs": [_runs(side) for side in sides],
        "verdict": [comparison.verdict(side, found) for side in sides[1:] if side.condition.fp8],
        "losses": [row for side in sides for row in comparison.losses(side, found)],
        "equal_loss": [row for side in sides for row in comparison.equal_loss(side, found)],
        "throughput": [comparison.throughput(side, found) for side in sides],
        "notes": [*comparison.notes(found), *(f"Left out: {line}" for line in left_out)],
    }


def write(folder: Path, found: Comparison, left_out: Sequence[str]) -> str:
    """Write the files into `folder`, and return the Markdown. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    sections, picture = _sections(plain(found, left_out), found), render.comparison(found)
    written = render.markdown(TITLE, sections, FILES[2] if picture else None)
    page = render.page(TITLE, render.markdown(TITLE, sections, None), picture)
    durable.write_text(folder / FILES[0], written)
    durable.write_text(folder / FILES[1], page)
    if picture is not None:
        (folder / FILES[2]).write_bytes(picture)
    return written


def _sections(told: dict[str, Any], found: Comparison) -> list[Section]:
    of = {"base": found.base.condition.name, "tokens": found.tokens, "width": found.width}
    shown = [(title, said.format(**of), told[key]) for key, (title, said) in _SECTIONS.items() if told[key]]
    sections = [Section(title, [said], _shown(rows)) for title, said, rows in shown]
    return [*sections, Section("Notes", told["notes"])] if told["notes"] else sections


def _runs(side: Side) -> Row:
    runs = side.condition.runs
    return {
        "condition": side.condition.name,
        "seeds": ", ".join(dict.fromkeys(str(run.settings.get("seed")) for run in runs)),
        "layers": runs[0].layers,
        "steps": ", ".join(f"{steps:,}" for steps in sorted({run.steps for run in runs})),
        "status": ", ".join(dict.fromkeys(run.status for run in runs)),
        "events": ", ".join(f"{times} {what}" for run in runs for what, times in run.trouble.items()),
    }


def _shown(rows: Sequence[Row]) -> list[dict[str, str]]:
    return [
        {key.replace("_", " "): "" if cell is None else format(cell, _FORMS.get(key, "")) for key, cell in row.items()}
        for row in rows
    ]
