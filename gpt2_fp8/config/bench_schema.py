"""Every key of the benchmark program. Their values are in `conf/bench.yaml`, for a GPU and for a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import finding
from gpt2_fp8.config.ranges import Count, Refusal, above_zero, at_least
from gpt2_fp8.config.schema import RunConfig

_LONGEST = 10**8  # seconds: three years, and within what a clock takes
TOKENS_PER_STEP = 131_072  # about; of a step on a GPU
_TIMEOUT = Refusal("must be above 0", "choose seconds, such as {key}=600")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure: all combinations of the four lists, with a recipe only if the precision is FP8.

    `--help` shows the text beside each type.
    """

    model: Annotated[list[str], "choices of the group model"]
    precision: Annotated[list[str], "fp32, bf16, fp8_hybrid, fp8_e4m3"]
    recipe: Annotated[list[str], "of the FP8 precisions: delayed, current, rowwise, block, mxfp8"]
    micro_batch_size: Annotated[list[Count], "sequences a forward pass"]
    # null: on a GPU as many micro-batches as come nearest to 131,072 tokens, at least one
    global_batch_size: Annotated[Count | None, "sequences a step; null: about 131,072 tokens, on a CPU one micro-batch"]
    # where it is not in the lists
    baseline: Annotated[bool, "on a GPU also bf16 under torch.compile, which the ratios refer to"]
    steps: Annotated[Count, "timed steps"]
    warmup: Annotated[int, at_least(0), "steps before them"]
    timeout: Annotated[float, above_zero(_LONGEST, "seconds", _TIMEOUT), "seconds that a case may take"]
    profile: Annotated[bool, "also the kernels that a step's time goes to"]
    # instead of the combinations of precision and recipe; the ratios are then to the first row and to the row before
    rows: Annotated[str | None, "a file of lines NAME: WORDS OF A RUN, measured in turn"] = None


@dataclass(frozen=True, kw_only=True)
class BenchRunConfig(RunConfig):
    """All that the benchmark's command line knows: a run's keys, which hold for every case, and its own."""

    bench: BenchConfig


def check(bench: BenchConfig) -> Iterator[Finding]:
    """Find what is wrong with settings whose types and ranges are right."""
    for name in ("model", "micro_batch_size"):
        if bench.rows is not None and len(set(getattr(bench, name))) > 1:
            reason = "the rows of bench.rows are compared on one"
            yield _finding(bench, name, reason, f"name one; a row may say {name}=VALUE for itself")
    for name in ("model", "precision", "recipe", "micro_batch_size"):
        if not getattr(bench, name):
            yield _finding(bench, name, "nothing to measure", f"leave bench.{name} out, or name what to measure")
    if bench.global_batch_size is not None and bench.micro_batch_size:
        whole = bench.global_batch_size
        if over := [size for size in bench.micro_batch_size if whole % size]:
            reason = f"a step does not divide into forward passes of {over[0]}"
            every = math.lcm(*bench.micro_batch_size)
            larger = -(-whole // every) * every
            yield _finding(bench, "global_batch_size", reason, f"bench.global_batch_size={larger}")


def sequences_per_step(bench: BenchConfig, micro_batch_size: int, n_positions: int, gpu: bool) -> int:
    """Return a step's sequences: `bench.global_batch_size`, or the number that its null stands for."""
    if bench.global_batch_size is not None:
        return bench.global_batch_size
    micro_batches = round(TOKENS_PER_STEP / (micro_batch_size * n_positions)) if gpu else 1
    return micro_batch_size * max(1, micro_batches)


def _finding(bench: BenchConfig, name: str, reason: str, remedy: str) -> Finding:
    return finding(bench, name, reason, remedy, "bench.")
