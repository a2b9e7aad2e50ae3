"""A sweep's table: what was varied and what each job reached. It is printed, and `sweep.csv` and `.md`."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config import disk, own_words, run_length
from gpt2_fp8.config.shown import as_typed, format_count, table
from gpt2_fp8.reports import runs

UNFINISHED, NOT_RUN = "unfinished", "not run"
MOST_LINES = 40  # rows on a terminal
# How a run can end, in the order in which a table shows the jobs; the first three may have results to compare.
_RANKS = {"completed": 0, "stopped": 0, "interrupted": 0, "diverged": 1, "data_lost": 2, "failed": 3, "refused": 3,
          UNFINISHED: 4, NOT_RUN: 5}  # fmt: skip
# A column, its key in summary.json, and how it is shown.
_FIGURES = (
    ("val_loss", "last_val_loss", ".4f"), ("best_val_loss", "best_val_loss", ".4f"),
    ("train_loss", "last_train_loss", ".4f"), ("tokens_per_second", "tokens_per_second", ",.0f"),
    ("peak_memory_gb", "peak_memory_gb", ".1f"), ("steps", "steps", ",.0f"),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job of a sweep."""

    folder: str  # below the sweep's; empty if it did not run
    words: tuple[str, ...]
    status: str
    message: str = ""
    figures: dict[str, float] = field(default_factory=dict)  # by column; what it did not reach is missing

    @property
    def best(self) -> float | None:
        """The validation loss that jobs are compared by."""
        return self.figures.get("best_val_loss", self.figures.get("val_loss"))

    @property
    def order(self) -> tuple[int, bool, float, bool, float]:
        """The place in a table: best first, what has no validation behind that by its training loss, failed last."""
        best, train = self.best, self.figures.get("train_loss")
        return _RANKS[self.status], best is None, best or 0.0, train is None, train or 0.0


def read(folder: Path) -> list[Job]:
    """Return the jobs in a sweep's folder, best first, and those that its plan still lacks. Raises OSError."""
    planned, found = None, list(runs.below(folder))
    with suppress(OSError, ValueError):
        planned = runs.at(disk.read_json(folder / own_words.PLAN), list, "jobs")
    jobs = [_job(path, str(path.relative_to(folder))) for path in found if planned is None or path != folder]
    ran = {frozenset(job.words) for job in jobs}
    missing = [words for words in map(_texts, planned or []) if frozenset(words) not in ran]
    return sorted([*jobs, *(Job("", words, NOT_RUN) for words in missing)], key=lambda job: job.order)


def write(folder: Path, jobs: Sequence[Job]) -> Iterator[str]:
    """Write the files into `folder`; yield what to print, the table before anything is written. Raises OSError."""
    counts = ", ".join(f"{number:,} {status}" for status, number in Counter(job.status for job in jobs).items())
    count = f"{format_count(len(jobs), 'job')}: {counts}"
    rows, forms = job_rows(jobs), {column: form for column, _, form in _FIGURES}
    shown = [{key: format(cell, forms.get(key, "") if cell != "" else "") for key, cell in row.items()} for row in rows]
    more = f"\n{len(jobs) - MOST_LINES:,} more jobs: in sweep.csv" if len(jobs) > MOST_LINES else ""
    yield f"\nSweep of {count}\n\n{table(shown[:MOST_LINES])}{more}\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    durable.write_text(folder / "sweep.csv", file.getvalue())
    told = f"{count}. Losses in nats a token; best first, by the best validation loss."
    durable.write_text(folder / "sweep.md", f"{told}\n\n{table(shown)}\n")
    yield f"{folder}: sweep.csv, sweep.md"
    if sum(job.status == "completed" for job in jobs) > 1:
        yield f"next: python -m gpt2_fp8.compare {shlex.quote(str(as_typed(folder)))}"


def find_varied(jobs: Sequence[Job]) -> dict[str, list[str]]:
    """Return the keys whose values differ between jobs, each with what was typed for every job; empty if nothing."""
    given = [_values(job.words) for job in jobs]
    keys = dict.fromkeys(key for values in given for key in values)
    columns = {key: [values.get(key, "") for values in given] for key in keys}
    return {key: values for key, values in columns.items() if len(set(map(meant, values))) > 1}


def job_rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return a row for each job, with numbers unrounded. What is unknown is empty."""
    keys = find_varied(jobs)
    return [
        {"job": job.folder, **{key: column[place] for key, column in keys.items()}, "status": job.status,
         **{column: job.figures.get(column, "") for column, *_ in _FIGURES}, "note": job.message}
        for place, job in enumerate(jobs)
    ]  # fmt: skip


def meant(value: str) -> str | float:
    """Return what typed values are compared by: of a number, which may be written in several ways, its value."""
    for kind in (int, float):  # exactly, also where a float has too few digits
        with suppress(ValueError):
            if math.isfinite(number := kind(value)):
                return number
    return value


def _values(words: Sequence[str]) -> dict[str, str]:
    """Return a job's overrides by key. `~key` takes the key away."""
    parts = [(word, *word.partition("=")[::2]) for word in words]
    return {key.lstrip("+~"): "(removed)" if word.startswith("~") else value for word, key, value in parts}


def _job(path: Path, name: str) -> Job:
    try:
        found = runs.summary(path)
    except ValueError as error:
        return Job(name, _hydras_words(path), UNFINISHED, str(error))
    status = runs.at(found, str, "status")
    told = [(runs.at(found, str, "message") or "").partition("\n")[0].removeprefix("error: ")]
    if reason := runs.at(found, str, "precision", "reason"):
        told.append(f"ran {runs.at(found, str, 'precision', 'ran')}: {reason}")
    if (limit := runs.at(found, str, "ended_by")) in run_length.EARLY:
        told.append(f"ended by {limit}")
    figures = {column: runs.at(found, (int, float), key) for column, key, _ in _FIGURES}
    return Job(
        folder=name,
        words=_texts(found.get("overrides")) or _hydras_words(path),
        status=status if status in _RANKS else UNFINISHED,
        message="; ".join(filter(None, told)),
        figures={column: value for column, value in figures.items() if value is not None},
    )


def _hydras_words(path: Path) -> tuple[str, ...]:
    """Return the overrides that Hydra has written for a job; none if that file cannot be read."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        return _texts(yaml.safe_load((path / runs.HYDRA / "overrides.yaml").read_text(encoding="utf-8")))
    return ()


def _texts(value: object) -> tuple[str, ...]:
    """Return the texts in a list that was read; nothing of another value."""
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
