"""What a launcher has started: the processes of a run, and this one's place among them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

OWN, TORCHRUN, ACCELERATE, SRUN, VARIABLES = "Lightning", "torchrun", "accelerate launch", "srun", "RANK and WORLD_SIZE"
BY_AGENT = (TORCHRUN, ACCELERATE)  # whose processes an agent of torchrun's starts, and starts again


def agent(environment: Mapping[str, str]) -> str | None:
    """Return whose agent has started the process of an environment, by the name that is typed; None: none has.

    TORCHELASTIC_RUN_ID without a rank is left of something else.
    """
    if not (environment.get("TORCHELASTIC_RUN_ID") and (environment.get("RANK") or environment.get("WORLD_SIZE"))):
        return None
    return ACCELERATE if "ACCELERATE_MIXED_PRECISION" in environment else TORCHRUN


class Launcher(NamedTuple):
    """What started this process, and its place among the processes of the run.

    Attributes:
        name: as it is typed.
        node, nodes: which machine this is, and how many there are, as the launcher counts.
        address, port: where rank 0 or its agent listens; None where nobody else is to be met.
        restarts: how often SLURM has started the job again, and torchrun's agent the processes after a failure.
        restarts_left: how often torchrun's agent will yet.
        step: SLURM's job and step, if srun has started the processes.
        agent_listens: whether the launcher listens at the port; else rank 0 has to.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    address: str | None = None
    port: int | None = None
    restarts: int = 0
    restarts_left: int = 0
    agent_listens: bool = False
    step: str = ""

    @property
    def starts_all(self) -> bool:
        """Whether the launcher has started every process, so that Lightning starts none."""
        return self.name != OWN

    @property
    def agent(self) -> str | None:
        """The agent that listens at the port, as a message names it; None: rank 0 does."""
        return f"{self.name}'s agent" if self.agent_listens else None

    @property
    def several(self) -> bool:
        """Whether it has started several processes."""
        return self.starts_all and self.world_size > 1

    @property
    def meets(self) -> bool:
        """Whether there is a store to meet in: also a single process of torchrun's may have been one of several."""
        return self.several or self.agent_listens

    @property
    def forgets(self) -> bool:
        """Whether nothing outlives the processes that torchrun's agents start: it has no store, and counts failures.

        It counts neither a node that joins nor one that has left, after which all processes are started again.
        """
        return self.name in BY_AGENT and not self.agent_listens

    @property
    def again(self) -> bool:
        """Whether the processes have been started again, or may have been."""
        return self.restarts > 0 or self.forgets

    def __str__(self) -> str:
        """Return a line of the log."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        again = f", started again {self.restarts} times" if self.restarts > 1 else ", started again" * self.restarts
        return f"{self.name}: {self.world_size} process{'es' * (self.world_size > 1)}{nodes}{again}"
