"""Which device a run computes on, and how many of them."""

from __future__ import annotations

from typing import Literal

import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig


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
    if asked == "auto":
        return present if on == "cuda" else 1
    if on == "cuda" and asked > present:
        raise UserError.of(f"trainer.devices={asked}, and torch sees {present} GPUs", f"trainer.devices={present}")
    return asked
