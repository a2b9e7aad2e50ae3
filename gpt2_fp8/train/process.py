"""The processes of a run: what Lightning is told of them, and what a run changes in its own.

Lightning learns who the ranks are, which device is whose, and how they form a group.
"""

from __future__ import annotations

import gc
import logging
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

from gpt2_fp8.compat import transformer_engine
from gpt2_fp8.compat.lightning_private import ignore_warnings
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import collectives, ranks, rendezvous
from gpt2_fp8.runtime import devices as present

_QUIET = (
    *("lightning.pytorch", "lightning.fabric"),
    *("datasets", "huggingface_hub", "httpx", "httpx2"),  # a line for each file and each request
)


class LaunchedEnvironment(TorchElasticEnvironment):
    """Processes that a launcher has started: their number is the launcher's. `index`: of this one's device."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def local_rank(self) -> int:
        """Return the index of this process's device among those that it sees, which may be one (srun)."""
        return self._index

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any number of devices."""


class RanksStrategy(DDPStrategy):
    """DDP that forms its process group where the ranks have met, so that each generation has a new one."""

    def __init__(self) -> None:
        super().__init__(timeout=collectives.GROUP_TIMEOUT)

    def setup_environment(self) -> None:
        """Form the group. Ranks of Lightning's own launcher, under a script, form it themselves."""
        met = rendezvous.joined()
        if met is not None and not torch.distributed.is_initialized():
            on_gpu = self.root_device.type == "cuda"
            torch.distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=met.group_store(),
                rank=met.ranks.rank,
                world_size=met.ranks.world_size,
                timeout=collectives.GROUP_TIMEOUT,
                device_id=self.root_device if on_gpu else None,
            )
        super().setup_environment()


def environment(config: RunConfig, on: Literal["cuda", "cpu"]) -> ClusterEnvironment:
    """Return who the processes are, for Lightning, whatever it would detect.

    Raises UserError if there are fewer GPUs on this node than processes.
    """
    place = ranks.current()
    if not place.several:
        return LightningEnvironment()
    return LaunchedEnvironment(
        present.place(place, torch.cuda.device_count()) if on == "cuda" else place.local_rank
    )  # fmt: skip


def devices(config: RunConfig, on: Literal["cuda", "cpu"]) -> int:
    """Return the number of devices that this process has to see, for Lightning.

    Raises UserError as `runtime.devices` does.
    """
    place = ranks.current()
    if on == "cuda" and place.several:
        return min(place.local_world_size, torch.cuda.device_count())
    return present.devices(config, on)


def strategy(config: RunConfig, on: Literal["cuda", "cpu"]) -> Any:
    """Return how the ranks train together, for Lightning."""
    several = ranks.current().several or present.devices(config, on) * config.trainer.num_nodes > 1
    return RanksStrategy() if several else config.trainer.strategy


def quiet() -> None:
    """Leave the log to this run, on one rank, and the peak of memory to this run alone."""
    present.reset_peak_host()
    if not ranks.is_first_rank():
        logging.getLogger("gpt2_fp8").setLevel(logging.WARNING)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # the table of debug=profiler
    ignore_warnings()


def clean_up() -> None:
    """Free what ran before: the next run in the process may follow a rollback, or be a sweep's next job."""
    gc.collect()
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    transformer_engine.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
