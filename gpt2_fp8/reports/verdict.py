"""The verdict on FP8: its checklist, answered for each condition that has computed in it."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2_fp8.reports.checklist import CHECKLIST
from gpt2_fp8.reports.comparison import Comparison
from gpt2_fp8.reports.runs import Run


@dataclass(frozen=True)
class Line:
    """A line of the checklist, answered."""

    item: str
    rule: str
    answer: str
    figure: str


@dataclass(frozen=True)
class Verdict:
    """The checklist for one condition that has computed in FP8."""

    condition: str
    lines: list[Line]


def judge(found: Comparison) -> list[Verdict]:
    """Answer the checklist for each condition that has computed in FP8, against the base."""
    return [
        Verdict(
            result.condition.name,
            [Line(item, rule, *answer(result, found)) for item, rule, answer in CHECKLIST],
        )
        for result in found.results
        if result.condition.fp8
    ]


def why_none(found: Comparison) -> str | None:
    """Say why there is no verdict; None if there is one."""
    if any(result.condition.fp8 for result in found.results):
        return None
    fell = [run for result in found.results for run in result.condition.runs if _fp8_asked(run) and run.reason]
    if fell:
        return f"No FP8 was compared: {fell[0].asked} was asked for, and {fell[0].ran} ran ({fell[0].reason})."
    return "No FP8 was compared: no run has computed in FP8."


def _fp8_asked(run: Run) -> bool:
    return (run.asked or "").startswith("fp8")
