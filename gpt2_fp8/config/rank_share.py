"""How many processes train, and each one's share of a step. Standard library only."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from gpt2_fp8.config.model_checks import largest_divisor
from gpt2_fp8.config.schema import RunConfig


def fitted(config: RunConfig, world_size: int, typed: Container[str], alone: bool = True) -> RunConfig:
    """Return the configuration with a micro-batch that divides a rank's share of a step, unless the key is `typed`.

    It is only ever lowered. What the ranks cannot share at all is left, for `checks.check_batch` to refuse, and so is
    the micro-batch of a run of one process that is `alone`: no launcher may have started others before.
    """
    micro, whole = config.micro_batch_size, config.global_batch_size
    if micro == "auto" or (alone and world_size == 1) or whole % world_size or "micro_batch_size" in typed:
        return config
    fits = largest_divisor(whole // world_size, micro)
    return config if fits == micro else replace(config, micro_batch_size=fits)


def said(before: RunConfig, config: RunConfig) -> Iterator[str]:
    """Yield in words what `fitted` has made of the micro-batch of `before`."""
    was, now = before.micro_batch_size, config.micro_batch_size
    if was != now:
        yield (
            f"micro-batch {now} instead of {was}, which does not divide a process's share of the "
            f"{config.global_batch_size} sequences of a step; micro_batch_size=NUMBER sets it"
        )
