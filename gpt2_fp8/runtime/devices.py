"""Which device a run computes on, and how many of them."""

from __future__ import annotations

from typing import Literal

import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks
from gpt2_fp8.runtime.ranks import Ranks


def device(config: RunConfig) -> Literal["cuda", "cpu"]:
    """Return the device of the run. Raises UserError for `trainer=gpu` if there is no GPU."""
    if config.trainer.accelerator == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if config.trainer.accelerator == "gpu":
        raise UserError.of("trainer.accelerator=gpu, and torch sees no GPU here", "trainer=cpu, or trainer=auto")
    return "cpu"


def devices(config: RunConfig, on: Literal["cuda", "cpu"]) -> int:
    """Return the number of processes on this machine: what was asked for; `auto` is every GPU, or one on a CPU.

    Raises UserError if there are fewer GPUs than asked for.
    """
    asked, present = config.trainer.devices, torch.cuda.device_count()
    started = ranks.current()
    if started.several:
        if on == "cuda":
            place(started, present)
        return started.local_world_size
    if asked == "auto":
        return present if on == "cuda" else 1
    if on == "cuda" and asked > present:
        raise UserError.of(f"trainer.devices={asked}, and torch sees {present} GPUs", f"trainer.devices={present}")
    return asked


def place(started: Ranks, present: int) -> int:
    """Return which of the `present` GPUs is this process's: the one of its place on its node.

    A process that sees a single GPU was given it (`srun --gpus-per-task=1`). Raises UserError if the launcher has
    started more processes than there are GPUs.
    """
    if present == 1 and started.local_world_size > 1:
        return 0
    if started.local_world_size > present:
        cause = f"{started.launcher} has started {started.local_world_size} processes on this node"
        remedy = f"as many processes on each node as it has GPUs ({present} here), or trainer.accelerator=cpu"
        raise UserError.of(f"{cause}, and torch sees {present} GPUs", remedy)
    return started.local_rank
