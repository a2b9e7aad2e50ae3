"""Which device a run computes on and how many of them, and what is measured of this process: power, peak memory."""

from __future__ import annotations

import logging
import resource
import sys
from typing import Literal

import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks
from gpt2_fp8.runtime.ranks import Ranks

log = logging.getLogger(__name__)


def device(config: RunConfig) -> Literal["cuda", "cpu"]:
    """Return the device of the run. Raises UserError for `trainer=gpu` if there is no GPU."""
    if config.trainer.accelerator == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if config.trainer.accelerator == "gpu":
        raise UserError.of("trainer.accelerator=gpu, and torch sees no CUDA GPU here", "trainer=cpu, or trainer=auto")
    return "cpu"


def devices(config: RunConfig, on: Literal["cuda", "cpu"]) -> int:
    """Return the number of processes on this machine: every GPU for `auto`. Raises UserError if there are fewer."""
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
    """Return which of the `present` GPUs is this process's. A single one was given to it (`srun --gpus-per-task=1`).

    Raises UserError if the launcher has started more processes than there are GPUs.
    """
    if present == 1 and started.local_world_size > 1:
        return 0
    if started.local_world_size > present:
        cause = f"{started.launcher} has started {started.local_world_size} processes on this node"
        remedy = f"as many processes on each node as it has GPUs ({present} here), or trainer.accelerator=cpu"
        raise UserError.of(f"{cause}, and torch sees {present} GPUs", remedy)
    return started.local_rank


def take(started: Ranks) -> str:
    """Make this process's GPU the current one, whose name and kernels are asked for from here on; returns its UUID."""
    index = place(started, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return str(torch.cuda.get_device_properties(index).uuid)


def read_gpu_meter() -> dict[str, float]:
    """Return the GPU's watts, and the part of the last moment (0 to 1) in which a kernel ran, as the driver says.

    It is {} without the library `nvidia-ml-py`, and in containers where the driver does not answer.
    """
    try:
        return {"gpu_power_watts": torch.cuda.power_draw() / 1000, "gpu_utilization": torch.cuda.utilization() / 100}
    except Exception as error:  # pynvml's errors are classes of its own, and pynvml may not be there
        log.debug("no power and utilisation of the GPU in the log: %s", error)
        return {}


def peak_host_gb() -> float:
    """Return the most that was resident at once since the process began, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
