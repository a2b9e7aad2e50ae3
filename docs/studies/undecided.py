"""What a run decides itself once it begins. A study that computes without one needs it in the words."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config import run_length
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.schema import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what words leave to the run, and what to type instead."""
    if config.micro_batch_size == "auto":
        yield Problem(
            "micro_batch_size=auto is measured by a run alone", f"micro_batch_size={config.global_batch_size}"
        )
    if not run_length.limits(config):
        cause = f"trainer.max_epochs={config.trainer.max_epochs}: the run alone counts steps"
        yield Problem(cause, "trainer.max_steps=100")
