"""From facts to findings, and from these to the one line that matters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from gpt2_fp8.config.annotations import hints_of
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.diagnose import rules_gpu, rules_host, rules_te, rules_torch
from gpt2_fp8.diagnose.facts import Facts, Run, Step
from gpt2_fp8.diagnose.finding import Finding

STEP = "a step"
LAYERS = {"fused": "the fused layers", "te": "Transformer Engine's layers", "torchao": "torchao"}
# as `precision.backend=auto` tries them
REAL = tuple(name for name in get_args(hints_of(FP8PrecisionConfig)["backend"]) if name in LAYERS)
_RULES = (*rules_gpu.RULES, *rules_torch.RULES, *rules_te.RULES, *rules_host.RULES)


@dataclass(frozen=True)
class Verdict:
    """Whether FP8 works here, in one line; and what mends it if not, as a command."""

    works: bool
    line: str
    remedy: str | None


def findings(facts: Facts) -> list[Finding]:
    """Return what every rule says, in the order in which a person would mend it."""
    found = [finding for rule in _RULES for finding in rule(facts)]
    return [*found, *_crashed(facts), *_steps(facts)]


def _crashed(facts: Facts) -> list[Finding]:
    """Report parts that gave no answer, unless a rule above reports them."""
    if "runs" not in facts.failed or facts.torch.error:
        return []
    what = f"the backends could not be asked: {facts.failed['runs']}"
    return [Finding("backends", "fail", what, "The table below is not complete.", "python -m gpt2_fp8.run debug=fdr")]


def _steps(facts: Facts) -> list[Finding]:
    """Report what was measured."""
    found = []
    for name, step in facts.steps.items():
        if step.milliseconds is None or step.tokens_per_second is None:
            what = f"a step in {name} gave no time: {step.problem}"
            found.append(Finding(STEP, "fail" if name != "bf16" else "warn", what, None, _again(name)))
            continue
        layers = f", {LAYERS.get(step.backend, step.backend)}" if step.backend else ""
        what = f"{step.precision}{layers}: {step.milliseconds:.1f} ms, {step.tokens_per_second:,.0f} tokens/s"
        found.append(Finding(STEP, "ok", what))
    return found


def _again(precision: str) -> str:
    """Return the command that shows why a measured step failed."""
    return f"python -m gpt2_fp8.bench 'bench.precision=[{precision}]' 'bench.micro_batch_size=[16]'"


def backend(facts: Facts) -> str | None:
    """Return the fastest backend that computes FP8 here; None if there is none."""
    measured = facts.steps.get("fp8_hybrid")
    if measured and measured.backend in LAYERS:
        return measured.backend
    return next((name for name in REAL if any(run.works for run in in_fp8(facts, name))), None)


def in_fp8(facts: Facts, name: str) -> list[Run]:
    """Return the runs of a backend in FP8."""
    return [run for run in facts.runs.values() if run.backend == name and run.recipe is not None]


def verdict(facts: Facts, found: Sequence[Finding]) -> Verdict:
    """Return whether FP8 works here.

    It does if a backend says so, and nothing fails that its first step would meet.
    """
    worst, layers = next((one for one in found if one.status == "fail"), None), backend(facts)
    if layers and worst is None:
        return Verdict(True, f"FP8 works here: {LAYERS[layers]}{_ratio(facts.steps)}", None)
    if worst is not None:
        return Verdict(False, f"FP8 cannot run here: {worst.what}", worst.remedy)
    reasons = [run.reason for name in REAL for run in in_fp8(facts, name) if run.offered and run.reason]
    return Verdict(False, f"FP8 cannot run here: {reasons[0] if reasons else 'no backend was asked'}", None)


def _ratio(steps: dict[str, Step]) -> str:
    """Return how fast a step in FP8 is beside bf16, in words; nothing if that was not measured."""
    fp8, bf16 = steps.get("fp8_hybrid"), steps.get("bf16")
    if not (fp8 and bf16 and fp8.milliseconds and bf16.milliseconds):
        return ""
    times = f"{fp8.milliseconds:.1f} ms a step beside {bf16.milliseconds:.1f}"
    ratio = bf16.milliseconds / fp8.milliseconds
    return f", {ratio:.2f} x bf16 ({times})"
