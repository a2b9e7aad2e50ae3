"""Times a training step in FP8 and in bf16, each in a process of its own, on a GPU that can do FP8."""

from __future__ import annotations

from collections.abc import Callable

from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.diagnose import offers
from gpt2_fp8.diagnose.facts import Step
from gpt2_fp8.measure.case import Case, Result, measure

SECONDS = 150.0  # for one precision, with compilation
WARMUP, STEPS = 5, 10
# GPT-2 124M with its own vocabulary, on text that every machine has; 16 sequences fit into 16 GB
WORDS = ("data=stdlib", "model.vocab_size=50257", "micro_batch_size=16", "global_batch_size=16", "trainer=gpu")
MEASURED = {
    "fp8_hybrid": ("precision=fp8_hybrid", "precision.fallback=error"),
    "bf16": ("precision=bf16", "compile=true"),
}


def configs() -> dict[str, RunConfig]:
    """Return the runs that are measured, by their precision. Raises UserError if the settings do not compose."""
    return {name: offers.config(*WORDS, *words) for name, words in MEASURED.items()}


def measured(runs: dict[str, RunConfig], say: Callable[[str], None]) -> dict[str, Step]:
    """Measure each of `runs`; return a step for each, also for one that gave no time."""
    found = {}
    for name, config in runs.items():
        say(f"a training step of GPT-2 124M in {name}: {WARMUP} + {STEPS} steps")
        found[name] = step(name, config, measure(Case(config=config, steps=STEPS, warmup=WARMUP), SECONDS))
    return found


def step(name: str, config: RunConfig, result: Result) -> Step:
    """Return the time of a step from what was measured."""
    tokens, rate = tokens_a_step(config), result.tokens_per_second
    return Step(
        precision=result.ran or name,
        backend=result.backend,
        milliseconds=1e3 * tokens / rate if rate else None,
        tokens_per_second=rate,
        tokens=tokens,
        problem=None if rate else f"{result.status}: {result.message}",
    )
