"""Every key of the benchmark program. Their values are in `conf/bench.yaml`, for a GPU and for a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.parsing import show
from gpt2_fp8.config.schema import RunConfig

MOST = 10**12  # of anything that is counted
_LONGEST = 10**8  # seconds: three years, and within what a clock takes
TOKENS_PER_STEP = 131_072  # about; of a step on a GPU


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure: all combinations of the four lists, a recipe only where the precision is FP8."""

    model: list[str]  # choices of the group `model`
    precision: list[str]
    recipe: list[str]
    micro_batch_size: list[int]  # sequences a forward pass
    global_batch_size: int | None  # sequences a step; null: on a GPU as many micro-batches as come nearest to
    # 131,072 tokens, at least one; on a CPU one micro-batch
    baseline: bool  # on a GPU also bf16 under torch.compile, which the ratios refer to, where it is not in the lists
    steps: int  # timed
    warmup: int  # steps before them
    timeout: float  # seconds that one case may take, its start and compilation included
    profile: bool  # the kernels that a step's time goes to
    gemm: bool  # how fast matrix products of the models' shapes are on this GPU
    attention: bool  # implementations of attention against each other
    peers: bool  # other programs on the same work, where they are installed


@dataclass(frozen=True, kw_only=True)
class BenchRunConfig(RunConfig):
    """All that the benchmark's command line knows: a run's keys, which hold for every case, and its own."""

    bench: BenchConfig


def check(bench: BenchConfig) -> Iterator[Finding]:
    """What is wrong with settings whose types are right."""
    for name in ("model", "precision", "recipe", "micro_batch_size"):
        if not getattr(bench, name):
            yield _finding(bench, name, "nothing to measure", f"leave bench.{name} out, or name what to measure")
    for name, least in (("steps", 1), ("warmup", 0), ("global_batch_size", 1)):
        value = getattr(bench, name)
        if value is not None and value < least:
            yield _finding(bench, name, f"must be at least {least}", f"choose {least} or more")
        elif value is not None and value > MOST:
            yield _finding(bench, name, f"is beyond {MOST:,}", "choose a number that can be reached")
    if any(size > MOST for size in bench.micro_batch_size):
        yield _finding(bench, "micro_batch_size", f"is beyond {MOST:,}", "choose sizes that a machine has room for")
    if bench.timeout > _LONGEST:
        yield _finding(bench, "timeout", f"is beyond {_LONGEST:,} seconds", "choose seconds, as bench.timeout=600")
    if bench.timeout <= 0:
        yield _finding(bench, "timeout", "must be above 0", "choose seconds, such as bench.timeout=600")
    if any(size < 1 for size in bench.micro_batch_size):
        yield _finding(bench, "micro_batch_size", "must be at least 1", "choose 1 or more")
    elif bench.global_batch_size is not None and bench.global_batch_size >= 1:
        whole = bench.global_batch_size
        if over := [size for size in bench.micro_batch_size if whole % size]:
            reason = f"a step does not divide into forward passes of {over[0]}"
            every = math.lcm(*bench.micro_batch_size)
            larger = -(-whole // every) * every
            yield _finding(bench, "global_batch_size", reason, f"bench.global_batch_size={larger}")


def sequences_per_step(bench: BenchConfig, micro_batch_size: int, n_positions: int, gpu: bool) -> int:
    """A step's `global_batch_size`; see the key."""
    if bench.global_batch_size is not None:
        return bench.global_batch_size
    micro_batches = round(TOKENS_PER_STEP / (micro_batch_size * n_positions)) if gpu else 1
    return micro_batch_size * max(1, micro_batches)


def _finding(bench: BenchConfig, name: str, reason: str, remedy: str) -> Finding:
    key = f"bench.{name}"
    return Finding((key,), Problem(f"{key}={show(getattr(bench, name))}: {reason}", remedy))
