"""The report: one line that matters, what is found, and the table of what can run. For a terminal, and as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from gpt2_fp8.config.shown import harmless, line
from gpt2_fp8.diagnose.facts import FORMAT, Facts, Run, to_json
from gpt2_fp8.diagnose.finding import Finding
from gpt2_fp8.diagnose.verdict import Verdict
from gpt2_fp8.measure import table

WIDTH = 80
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_INDENT = " " * 7
_NEVER = "-"
_ASKED = re.compile(r"^\S+ cannot run (here|on this GPU): ")  # the row and the column say it


def as_json(facts: Facts, found: Sequence[Finding], verdict: Verdict) -> dict[str, Any]:
    """Return the whole report as plain JSON values. Its facts can be read again (`facts.from_json`)."""
    return {
        "format": FORMAT,
        "fp8_works": verdict.works,
        "verdict": verdict.line,
        "remedy": verdict.remedy,
        "findings": [asdict(finding) for finding in found],
        "facts": to_json(facts),
    }


def as_text(facts: Facts, found: Sequence[Finding], verdict: Verdict) -> str:
    """Return the report for a terminal of 80 columns.

    A command is never broken, so that it can be copied. What a terminal would obey is escaped.
    """
    lines = [*_wrapped(verdict.line, "", "  ")]
    if verdict.remedy:
        lines.append(f"  fix: {line(verdict.remedy)}")
    for subject, group in groupby(found, key=lambda finding: finding.subject):
        lines += ["", subject]
        for finding in group:
            lines += _finding(finding)
    lines += ["", "what a run can ask for", *_table(facts)]
    return harmless("\n".join(lines))


def _finding(finding: Finding) -> Iterator[str]:
    yield from _wrapped(finding.what, f"  {_MARKS[finding.status]} ", _INDENT)
    if finding.why:
        yield from _wrapped(finding.why, _INDENT, _INDENT)
    if finding.remedy:
        yield f"{_INDENT}fix: {line(finding.remedy)}"


def _wrapped(text: str, first: str, others: str) -> list[str]:
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line(text), WIDTH, initial_indent=first, subsequent_indent=others, **whole)


def _table(facts: Facts) -> Iterator[str]:
    """Yield a row for each precision and recipe, a column for each backend, and the reasons below by number."""
    reasons: list[str] = []
    rows: list[table.Row] = []
    for (precision, recipe), group in groupby(facts.runs.values(), key=lambda run: (run.precision, run.recipe)):
        cells = {run.backend: _cell(run, reasons) for run in group}
        rows.append({"precision": precision, "recipe": recipe or "", **cells})
    yield from (f"  {row}" for row in table.text(rows).splitlines())
    yield f"  {_NEVER}: not together, on any machine"
    for number, reason in enumerate(reasons, 1):
        yield from _wrapped(reason, f"  {number}: ", "     ")


def _cell(run: Run, reasons: list[str]) -> str:
    if run.works:
        return "yes"
    if not run.offered or run.reason is None:
        return _NEVER
    reason = _ASKED.sub("", run.reason)
    if reason not in reasons:
        reasons.append(reason)
    return f"no {reasons.index(reason) + 1}"
