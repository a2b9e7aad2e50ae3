"""A sweep's table: what was varied, and what each job reached, for a terminal, for `sweep.csv` and for `sweep.md`.

Everything that a job's folder says may be a stranger's text. On a terminal it is escaped and cut. In Markdown it is no
markup. In the CSV file no cell begins as a formula does.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence

from gpt2_fp8.config.shown import line
from gpt2_fp8.config.typed import meant
from gpt2_fp8.measure import table
from gpt2_fp8.measure.table import Row
from gpt2_fp8.reports.sweep_jobs import Job

MOST_LINES = 40  # rows on a terminal
_MOST_KEYS = 6  # columns of varied keys there
_WIDEST = 48  # characters of a cell there
_LONGEST = 300  # characters of a cell in a file
_FORMULA = tuple("=+-@\t\r")
_OURS = [
    "job",
    "status",
    "val_loss",
    "best_val_loss",
    "train_loss",
    "tokens_per_second",
    "peak_memory_gb",
    "steps",
    "note",
]


def varied(jobs: Sequence[Job]) -> dict[str, list[str]]:
    """Return the keys whose values differ between jobs, each with the value of every job.

    A value is the text that was typed. It is empty where a job does not set the key. Numbers differ by what they are.
    """
    given = [_values(job.words) for job in jobs]
    keys = dict.fromkeys(key for values in given for key in values)
    columns = {key: [values.get(key, "") for values in given] for key in keys}
    return {key: values for key, values in columns.items() if len(set(map(meant, values))) > 1}


def text(jobs: Sequence[Job]) -> str:
    """Return the table for a terminal: at most `MOST_LINES` jobs, and a line that counts the others."""
    shown, keys = jobs[:MOST_LINES], varied(jobs)
    left = [f"{len(jobs) - len(shown):,} more jobs"] if len(jobs) > len(shown) else []
    left += [f"{len(keys) - _MOST_KEYS:,} more keys that differ"] if len(keys) > _MOST_KEYS else []
    first = dict(list(keys.items())[:_MOST_KEYS])
    rows = [
        {line(name, _WIDEST): line(str(cell), 2 * _WIDEST if name == "note" else _WIDEST) for name, cell in row.items()}
        for row in _rows(shown, first)
    ]
    return table.text(rows, verbatim=True) + (f"\n{' and '.join(left)}: in sweep.csv" if left else "")


def markdown(jobs: Sequence[Job]) -> str:
    """Return the whole table as Markdown."""
    rows = [
        {inert(name): inert(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        for row in _rows(jobs, varied(jobs))
    ]
    return table.markdown(rows, verbatim=True)


def comma_separated(jobs: Sequence[Job]) -> str:
    """Return the whole table as CSV, with numbers unrounded. What is unknown is empty."""
    keys, file = varied(jobs), io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [f"{key} (varied)" if key in _OURS else key for key in keys]
    writer.writerow([_OURS[0], *(_no_formula(line(name, _LONGEST)) for name in names), *_OURS[1:]])
    for place, job in enumerate(jobs):
        values = [_no_formula(line(column[place], _LONGEST)) for column in keys.values()]
        numbers = (job.val_loss, job.best_val_loss, job.train_loss, job.tokens_per_second, job.memory_gb, job.steps)
        note = _no_formula(line(job.message, _LONGEST))
        folder = _no_formula(line(job.folder or "", _LONGEST))
        writer.writerow([folder, *values, job.status, *("" if n is None else n for n in numbers), note])
    return file.getvalue()


def _rows(jobs: Sequence[Job], keys: dict[str, list[str]]) -> list[Row]:
    """Return a row for each job; `keys` as `varied` returns them, for at least these jobs."""
    rows: list[Row] = []
    for place, job in enumerate(jobs):
        row: Row = {"job": job.folder or ""}
        row |= {f"{key} (varied)" if key in _TITLES else key: values[place] for key, values in keys.items()}
        row |= {
            "val loss": _form(job.val_loss, ".4f"), "best": _form(job.best, ".4f"),
            "train loss": _form(job.train_loss, ".4f"), "tokens/s": _form(job.tokens_per_second, ",.0f"),
            "GiB": _form(job.memory_gb, ".1f"), "steps": _form(job.steps, ",d"), "status": job.status,
            "note": job.message,
        }  # fmt: skip
        rows.append(row)
    return rows


_TITLES = ("job", "val loss", "best", "train loss", "tokens/s", "GiB", "steps", "status", "note")


def _values(words: Sequence[str]) -> dict[str, str]:
    """Return a job's overrides by key. `~key` takes the key away."""
    values = {}
    for word in words:
        key, _, value = word.partition("=")
        values[key.lstrip("+~")] = "(removed)" if key.startswith("~") else value
    return values


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def inert(text: str) -> str:
    """Return a text on one line that Markdown shows as it is. The pipe is escaped with the table."""
    text = html.escape(line(text, _LONGEST), quote=False)
    return text.replace("\\", "\\\\").replace("`", "\\`").replace("[", "\\[").replace("*", "\\*")


def _no_formula(text: str) -> str:
    """Return a text that a spreadsheet does not compute: a number stays, any other beginning of a formula is quoted."""
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
