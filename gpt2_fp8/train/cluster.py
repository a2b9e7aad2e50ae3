"""What Lightning is told of the processes of a run: who they are, which device is whose, and how they form a group."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from gpt2_fp8.callbacks.rank_watchdog import RankWatchdog
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import collectives, launcher, meeting
from gpt2_fp8.runtime import devices as present
from gpt2_fp8.runtime.launched import Launcher
from gpt2_fp8.runtime.meeting import Meeting


class LaunchedEnvironment(ClusterEnvironment):
    """The processes that a launcher has started, for Lightning.

    Lightning's own environments compare `devices` with variables of theirs, and refuse what is meant here: their
    number is the launcher's.

    Args:
        started: this process's place.
        place: the index of its device among those that it sees.
    """

    def __init__(self, started: Launcher, place: int) -> None:
        super().__init__()
        self._started, self._place = started, place

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Return where the processes meet."""
        return self._started.address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Return the port there."""
        return self._started.port or 0

    @staticmethod
    def detect() -> bool:
        """Return False: it is given, not detected."""
        return False

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._started.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number is the launcher's."""

    def global_rank(self) -> int:
        """Return this process's rank."""
        return self._started.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is the launcher's."""

    def local_rank(self) -> int:
        """Return the index of this process's device."""
        return self._place

    def node_rank(self) -> int:
        """Return which node this is."""
        return self._started.node


class OneNode(LightningEnvironment):
    """Lightning's own launcher on one node, for Lightning.

    The ranks meet on this host. What a shell has of MASTER_ADDR, MASTER_PORT and NODE_RANK is of another run.
    """

    _port: int | None = None

    @property
    def main_address(self) -> str:
        """Return this host."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Return a free port; from when the first process has started others, the one that it has told them."""
        if self.creates_processes_externally:
            return super().main_port
        self._port = self._port or find_free_network_port()
        return self._port

    def node_rank(self) -> int:
        """Return 0."""
        return 0


class WatchedStrategy(DDPStrategy):
    """DDP whose ranks meet before they form a process group, and watch each other from then on.

    Lightning's own launcher leaves the meeting to the process group, which waits for a rank for half an hour, and names
    none. `runtime.meeting` says why a group is formed where its ranks have met.
    """

    def setup_environment(self) -> None:
        """Meet, unless the ranks have done so, have them watched, and form the group.

        Raises NotMet if a rank does not come.
        """
        if not torch.distributed.is_initialized():
            met = meeting.current()
            store = self._gathered() if met is None else self._form(met)
            assert self.lightning_module is not None
            for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RankWatchdog):
                    callback.have_met(self.launcher, store, self.global_rank, self.world_size)
        super().setup_environment()

    def _gathered(self) -> Any:
        """Meet the ranks of Lightning's own launcher; returns their store. The group comes to the same port."""
        self.set_world_ranks()
        place = self.cluster_environment
        assert place is not None
        own = Launcher(
            launcher.OWN, self.global_rank, self.world_size, address=place.main_address, port=place.main_port
        )
        self._met = Meeting(own)  # kept: rank 0 has the store
        return self._met.store

    def _form(self, met: Meeting) -> Any:
        """Form the group where the ranks have met; returns their store."""
        on_gpu = self.root_device.type == "cuda"
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=met.group_store(),
            rank=met.launcher.rank,
            world_size=met.launcher.world_size,
            timeout=collectives.GROUP_TIMEOUT,
            device_id=self.root_device if on_gpu else None,
        )
        return met.store


def environment(config: RunConfig, on: Literal["cuda", "cpu"]) -> ClusterEnvironment:
    """Return who the processes are, for Lightning; by Lightning's own launcher, whatever else is installed here.

    Raises UserError if there are fewer GPUs on this node than processes.
    """
    started = launcher.current()
    if started.several:
        return LaunchedEnvironment(started, _place(started, on))
    return OneNode() if config.trainer.num_nodes == 1 else LightningEnvironment()


def devices(config: RunConfig, on: Literal["cuda", "cpu"]) -> int:
    """Return the number of devices that this process has to see, for Lightning.

    Raises UserError as `runtime.devices` does.
    """
    started = launcher.current()
    if on == "cuda" and started.several:
        return min(started.local_world_size, torch.cuda.device_count())
    return present.devices(config, on)


def strategy(config: RunConfig, on: Literal["cuda", "cpu"]) -> Any:
    """Return how the ranks train together, for Lightning."""
    several = launcher.current().several or present.devices(config, on) * config.trainer.num_nodes > 1
    return WatchedStrategy() if several else config.trainer.strategy


def _place(started: Launcher, on: Literal["cuda", "cpu"]) -> int:
    return present.place(started, torch.cuda.device_count()) if on == "cuda" else started.local_rank
