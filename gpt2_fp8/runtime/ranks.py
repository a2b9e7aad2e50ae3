"""Which process of a run this is, as the environment says. Standard library only.

torchrun, `accelerate launch` and torch's agent (`runtime/rendezvous.py`) set torch's variables, such as RANK.
`srun` sets its own, which are translated into torch's. Without any of them a process is the only one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from gpt2_fp8.config.errors import Problem, UserError

TORCHRUN, ACCELERATE, SRUN, VARIABLES = "torchrun", "accelerate launch", "srun", "RANK and WORLD_SIZE"
OWN, OWN_ID = "torch's agent", "gpt2_fp8"  # `runtime/rendezvous.py`, and its TORCHELASTIC_RUN_ID
_OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NODES = re.compile(r"\[(\d+)[^\]]*\]")  # node[05-08,11] of a node list


class Ranks(NamedTuple):
    """The place of this process among the processes of a run, by the names of torch's variables."""

    launcher: str | None = None  # what has started it; None: nothing has, and it is the only process
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    restarts: int = 0  # of the group, by torch's agent
    has_agent: bool = False  # which has started it, and hosts the store

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.world_size // self.local_world_size

    def __str__(self) -> str:
        """Return a line of the log."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.launcher}: {self.world_size} process{'es' * (self.world_size > 1)}{nodes}"


def current(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return this process's place. Raises UserError for variables that are incomplete, or no numbers."""
    variables = _translate(environment)
    has_agent = _has_agent(variables)
    if not has_agent and not _is_one_of_several(variables):
        return Ranks()
    world_size = _number(variables, "WORLD_SIZE")
    local_world_size = _number(variables, "LOCAL_WORLD_SIZE", world_size)
    rank = _number(variables, "RANK")
    found = Ranks(
        _name(environment, has_agent), rank, world_size,
        _number(variables, "LOCAL_RANK", rank % max(local_world_size, 1)), local_world_size,
        _number(variables, "GROUP_RANK", rank // max(local_world_size, 1)),
        _number(variables, "TORCHELASTIC_RESTART_COUNT", 0), has_agent,
    )  # fmt: skip
    if not variables.get("MASTER_ADDR"):
        raise _error("MASTER_ADDR is not set")
    if not rank < world_size or not local_world_size > 0 or world_size % local_world_size:
        raise _error(f"RANK={rank}, WORLD_SIZE={world_size} and LOCAL_WORLD_SIZE={local_world_size} do not fit")
    return found


def export() -> None:
    """Set torch's variables in a task of srun, for torch and Lightning."""
    os.environ.update(_translate(os.environ))


def forget() -> None:
    """Remove torch's variables unless this is one of several processes: Lightning would read those of a container."""
    if not _has_agent(os.environ) and not _is_one_of_several(os.environ):
        for name in (*_OF_TORCH, "NODE_RANK"):
            os.environ.pop(name, None)


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or the only one; also where the variables are wrong."""
    variables = _translate(os.environ)
    several = (variables.get("WORLD_SIZE") or "1") != "1"  # a LOCAL_RANK alone was left in a shell
    rank = variables.get("RANK") or (several and variables.get("LOCAL_RANK")) or "0"
    return rank == "0" or not rank.isdigit()


def is_batch_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a SLURM batch job's: all that `sbatch` starts has ENVIRONMENT=BATCH.

    Else it is what `srun` started, but in a shell on a node, by the rule of Lightning's SLURMEnvironment.
    """
    if environment.get("ENVIRONMENT") == "BATCH" and "SLURM_JOB_ID" in environment:
        return True
    return "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def turns_before(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often SLURM has started this batch job before."""
    count = environment.get("SLURM_RESTART_COUNT", "0")
    return int(count) if is_batch_job(environment) and count.isascii() and count.isdigit() else 0


def _translate(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with torch's variables also in a task of srun. Source: srun(1), OUTPUT ENVIRONMENT."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in environment else "1"
    if tasks == "1" or (environment.get("WORLD_SIZE") or "1") != "1" or environment.get("TORCHELASTIC_RUN_ID"):
        return dict(environment)
    nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = _NODES.sub(r"\1", re.split(r",(?![^\[]*\])", hosts)[0])
    seed = "".join(filter(str.isdigit, environment.get("SLURM_JOB_ID", "")[-4:] + environment["SLURM_STEP_ID"]))
    return dict(environment) | {
        "RANK": environment.get("SLURM_PROCID", ""),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": str(int(tasks) // int(nodes)) if (tasks + nodes).isdigit() else "",
        "GROUP_RANK": environment.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or (first if nodes != "1" and first else "127.0.0.1"),
        # Jobs on one node, and steps of a job, get different ports, and all tasks of a step the same one.
        "MASTER_PORT": environment.get("MASTER_PORT") or str(15000 + int(seed or 0) % 10000),
    }


def _has_agent(variables: Mapping[str, str]) -> bool:
    return bool(variables.get("TORCHELASTIC_RUN_ID") and variables.get("RANK"))


def _is_one_of_several(variables: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE say so. Processes of Lightning's launcher, under a script, have no RANK."""
    return bool(variables.get("RANK")) and (variables.get("WORLD_SIZE") or "1") != "1"


def _name(environment: Mapping[str, str], has_agent: bool) -> str:
    if environment.get("TORCHELASTIC_RUN_ID") == OWN_ID:
        return OWN
    if has_agent:
        return ACCELERATE if "ACCELERATE_MIXED_PRECISION" in environment else TORCHRUN
    is_sruns = environment.get("SLURM_STEP_NUM_TASKS") == environment.get("WORLD_SIZE", "1")
    return VARIABLES if (environment.get("WORLD_SIZE") or "1") != "1" and not is_sruns else SRUN


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = variables.get(name) or ("" if default is None else str(default))
    if not (value.isascii() and value.isdigit()):
        raise _error(f"{name} is {value!a}, not a number" if value else f"{name} is not set")
    return int(value)


def _error(cause: str) -> UserError:
    remedy = f"start the processes with torchrun or srun; or unset {' '.join(_OF_TORCH)}, for a run of one"
    return UserError([Problem(f"{cause}, and the variables say that this is one of several processes", remedy)])
