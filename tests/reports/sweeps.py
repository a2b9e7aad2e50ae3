"""Sweeps whose losses are known, and what is found out about them."""

from gpt2_fp8.reports import compare_conditions, comparison_notes, conditions, find_runs, verdict
from tests.reports.made import rows, run, settings

SPREAD = {1: -0.01, 2: 0.0, 3: 0.01}  # of the seeds' losses


def line(above=0.0, slope=20):
    return lambda step: 10 + above - step / slope


def sweep(folder, precision="bf16", above=0.0, seeds=(1, 2, 3), seconds=0.5, steps=100, changed=None, **made):
    """Runs of a condition: the loss of a step is 10 + above - step / 20, and a little more or less by seed."""
    for seed in seeds:
        logged = rows(line(above + SPREAD[seed]), steps, seconds=seconds, validations={steps: 5 + above + SPREAD[seed]})
        run(folder / f"{precision}-{above}-{seed}", logged, settings(precision, seed, **(changed or {})), **made)


def compared(folder, base=None):
    found = find_runs.below([folder], lambda *_: None)
    each = conditions.of(found.runs)
    chosen = conditions.base_of(each) if base is None else next(c for c in each if c.name == base)
    return compare_conditions.compare(each, chosen)


def answers(found):
    (judged,) = verdict.judge(found)
    return {entry.item: (entry.answer, entry.figure) for entry in judged.lines}


def notes(found):
    return " ".join(comparison_notes.of(found, []))
