"""The checklist for FP8 before it is trusted, of seed 000 in docs/seeds.md, and how each line is answered.

A line has a rule, the figure that was found, and one of three answers. A line is not answered from a single seed
where the answer depends on how far seeds differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpt2_fp8.reports.comparison import COMPLETED, CUT, Comparison, Gap, Result
from gpt2_fp8.reports.spread import percent

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be told"
STEPS = 100  # of a test run
LOSS_WITHIN = 0.05
FASTER = 1.5
MEMORY = 0.75
_EMULATED = "emulated"
_SHOWN_SEEDS = "several seeds: seed=1,2,3"


class Answer(NamedTuple):
    """One of three answers, and the figure behind it."""

    answer: str
    figure: str


def _installed(result: Result, found: Comparison) -> Answer:
    layers = result.condition.runs[0].layers or "layers unknown"
    versions = {run.transformer_engine for run in result.condition.runs}
    if _EMULATED in layers or "torchao" in layers or None in versions:
        return Answer(UNKNOWN, f"the runs had other layers: {layers}")
    return Answer(HOLDS, f"version {', '.join(sorted(map(str, versions)))}; {layers}")


def _completes(result: Result, found: Comparison) -> Answer:
    runs = result.condition.runs
    ended = sum(run.status == COMPLETED for run in runs)
    figure = f"{ended} of {len(runs)} runs completed, the shortest of {min(run.steps for run in runs):,} steps"
    if ended < len(runs):
        stopped = all(run.status in (COMPLETED, *CUT) for run in runs)
        return Answer(UNKNOWN if stopped else FAILS, figure)
    return Answer(HOLDS if min(run.steps for run in runs) >= STEPS else UNKNOWN, figure)


def _losses(result: Result, found: Comparison) -> Answer:
    if why := _not_judged(result, found):
        return Answer(UNKNOWN, why)
    gaps = [gap for gap in [*result.at_tokens, result.train, result.validation] if gap is not None]
    if not gaps:
        return Answer(UNKNOWN, "no loss at the same tokens")
    worst = max(gaps, key=lambda gap: abs(gap.relative))
    last = result.validation or result.train
    assert last is not None, "there are gaps"
    most = percent(abs(worst.relative))
    figure = f"{percent(last.relative, sign=True)} at the end, at most {most} at any of the tokens shown"
    reach = [_reach(gap) for gap in gaps]
    counted = [*found.compared[result.condition.name], *found.compared[found.base.name]]
    if any(run.status != COMPLETED for run in counted):
        return Answer(UNKNOWN, f"{figure}, so far: not all of these runs came to their end")
    if None in reach:
        return Answer(UNKNOWN, f"{figure}; single seeds do not say how far seeds differ: it takes {_SHOWN_SEEDS}")
    if max(high for _, high in filter(None, reach)) <= LOSS_WITHIN:
        return Answer(HOLDS, figure)
    if max(low for low, _ in filter(None, reach)) > LOSS_WITHIN:
        return Answer(FAILS, figure)
    return Answer(UNKNOWN, f"{figure}, with the seeds' spread on both sides of {percent(LOSS_WITHIN, 0)}: more seeds")


def _reach(gap: Gap) -> tuple[float, float] | None:
    """Return the least and the largest size of a relative difference within its bounds; None without a spread."""
    low, high = gap.difference.below, gap.difference.above
    if low is None or high is None:
        return None
    ends = (low / gap.base.mean, high / gap.base.mean)
    return (0.0 if low <= 0 <= high else min(map(abs, ends))), max(map(abs, ends))


def _speed(result: Result, found: Comparison) -> Answer:
    own, base = result.speed.tokens_per_second, found.results[0].speed.tokens_per_second
    if why := _not_judged(result, found) or _not_timed(result, found):
        return Answer(UNKNOWN, why)
    if own is None or base is None:
        return Answer(UNKNOWN, "no speed was logged")
    ratio = own.mean / base.mean
    return Answer(
        HOLDS if ratio >= FASTER else FAILS, f"{ratio:.2f} times: {own.mean:,.0f} and {base.mean:,.0f} tokens/s"
    )


def _memory(result: Result, found: Comparison) -> Answer:
    own, base = result.speed.memory_gb, found.results[0].speed.memory_gb
    if why := _not_judged(result, found) or _not_timed(result, found):
        return Answer(UNKNOWN, why)
    if own is None or not base:
        return Answer(UNKNOWN, "no GPU memory was logged")
    return Answer(HOLDS if own / base <= MEMORY else FAILS, f"{percent(own / base, 0)}: {own:.1f} and {base:.1f} GiB")


def _stable(result: Result, found: Comparison) -> Answer:
    runs = result.condition.runs
    counts = {
        "diverged": sum(run.status == "diverged" for run in runs),
        "losses not finite": sum(run.curve.not_finite for run in runs),
        "steps skipped": sum(run.skipped_steps for run in runs),
        "steps run again in bf16": sum(run.reruns for run in runs),
        "rollbacks": sum(run.rollbacks for run in runs),
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    steps = sum(run.steps for run in runs)
    return Answer(FAILS, told) if told else Answer(HOLDS, f"none of these in {steps:,} steps of {len(runs)} runs")


def _texts(result: Result, found: Comparison) -> Answer:
    both = set(result.condition.runs[0].samples) & set(found.base.runs[0].samples)
    if not both:
        return Answer(UNKNOWN, "no samples at the same step: callbacks.sample_tokens=128")
    return Answer(UNKNOWN, "for a reader to judge: the report has samples side by side")


def _resumes(result: Result, found: Comparison) -> Answer:
    runs = result.condition.runs
    again, saved = sum(run.resumed for run in runs), sum(run.saved for run in runs)
    told = f"{saved} of {len(runs)} runs saved a checkpoint, {again} continued from one"
    if any(run.resumed and run.status == "completed" for run in runs) and saved == len(runs):
        return Answer(HOLDS, told)
    return Answer(UNKNOWN if saved else FAILS, told)


def _tensorboard(result: Result, found: Comparison) -> Answer:
    runs = result.condition.runs
    there = sum(run.event_file for run in runs)
    off = any(run.settings.get("logger.tensorboard") is False for run in runs)
    told = f"{there} of {len(runs)} runs have an event file"
    return Answer(HOLDS if there == len(runs) else UNKNOWN if off else FAILS, told)


def _not_judged(result: Result, found: Comparison) -> str | None:
    """Say why a difference from the base would not be one of FP8."""
    if result.not_comparable:
        return result.not_comparable
    if found.base.fp8:
        return f"the base, {found.base.name}, has computed in FP8 too: give bf16 runs"
    if keys := result.condition.differs(found.base):
        return f"other settings differ from the base's too: {', '.join(keys[:3])}"
    return None


def _not_timed(result: Result, found: Comparison) -> str | None:
    """Say why speed and memory would not be those of FP8 on one device."""
    runs = [*result.condition.runs, *found.base.runs]
    if any(_EMULATED in (run.layers or "") for run in runs):
        return "FP8 was emulated, which is slow by design"
    if any(run.device is None or run.device == "cpu" for run in runs):
        return "not on a GPU"
    devices = sorted({run.device for run in runs if run.device})
    return f"other devices: {', '.join(devices[:3])}" if len(devices) > 1 else None


CHECKLIST: list[tuple[str, str, Callable[[Result, Comparison], Answer]]] = [
    ("Transformer Engine installs, and is imported", "the runs computed with it", _installed),
    ("A test run in FP8 completes", f"every run completed, of {STEPS} steps or more", _completes),
    ("Loss curves similar to bf16's", f"within {percent(LOSS_WITHIN, 0)}, with the spread of the seeds", _losses),
    ("Throughput higher than bf16's", f"{FASTER} times or more on the same device", _speed),
    ("Less GPU memory than bf16", f"at most {percent(MEMORY, 0)} of bf16's", _memory),
    ("No NaN losses or instability", "nothing skipped, run again, rolled back, or not finite", _stable),
    ("Text as good as bf16's", "a reader compares samples", _texts),
    ("Checkpoints are saved and resumed", "every run saved one, and a run that continued completed", _resumes),
    ("TensorBoard logs", "every run has an event file", _tensorboard),
]  # fmt: skip
