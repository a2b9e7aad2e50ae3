"""What `trainer=fsdp` divides among ranks, and what it cannot divide."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import problem
from gpt2_fp8.config.run_length import known_ranks, largest_divisor
from gpt2_fp8.config.schema import RunConfig


def ranks_of_copy(config: RunConfig, world_size: int, local_world_size: int) -> int:
    """Return among how many ranks a copy of the model is divided."""
    shard = config.trainer.shard
    assert shard is not None
    return shard if isinstance(shard, int) else {"all": world_size, "node": local_world_size}[shard]


def check(config: RunConfig) -> Iterator[Problem]:
    """Find settings that are another strategy's, and what FSDP cannot divide."""
    options = config.trainer
    values = {"shard": options.shard, "reshard": options.reshard, "gather": options.gather}
    if options.strategy != "fsdp":
        if given := " ".join(f"trainer.{key}" for key, value in values.items() if value is not None):
            yield problem(config, given, f"this is trainer.strategy={options.strategy}", "trainer=fsdp")
        return
    if missing := " ".join(f"trainer.{key}" for key, value in values.items() if value is None):
        yield problem(config, missing, "FSDP needs it", "trainer=fsdp sets all of its keys")
        return
    if options.devices != "auto":
        yield from check_ranks(config, known_ranks(config))
    if config.optimizer.name == "muon":
        reason = "it makes a whole matrix orthogonal, and with trainer=fsdp a rank has some of its rows"
        yield Problem(f"optimizer=muon: {reason}", "optimizer=adamw", ("optimizer",))
    if config.optimizer.name == "registered":
        reason = "with trainer=fsdp a rank has some rows of a matrix, and what it does with them is not known"
        yield Problem(f"optimizer=registered: {reason}", "optimizer=adamw", ("optimizer",))
    if config.precision.name == "fp32" and options.gather == "bfloat16":
        yield problem(config, "trainer.gather precision.name", "fp32 computes in float32", "trainer.gather=float32")


def check_ranks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Find a number of ranks among which the model cannot be divided."""
    options = config.trainer
    if options.strategy != "fsdp":
        return
    if world_size == 1:
        yield Problem("trainer=fsdp divides the model among processes, and there is one", "trainer=auto", ("trainer",))
    elif isinstance(options.shard, int) and world_size % options.shard:
        fits = largest_divisor(world_size, min(options.shard, world_size))
        near = f"trainer.shard={fits}" if fits > 1 else "trainer.shard=all"
        yield problem(config, "trainer.shard", f"{world_size} processes do not divide into groups of so many", near)
