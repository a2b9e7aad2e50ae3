"""Who started this process, and which of how many it is, as the environment says. Standard library only.

torchrun, `accelerate launch` (which uses torchrun's agent), srun, and anything else that sets RANK and WORLD_SIZE start
every process of a run. Otherwise there is one process, or Lightning starts the others from it. A launcher is recognised
by its variables, so there is no key for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from gpt2_fp8.config.errors import Problem, UserError

OWN, TORCHRUN, ACCELERATE, SRUN, VARIABLES = "Lightning", "torchrun", "accelerate launch", "srun", "RANK and WORLD_SIZE"
_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # SLURM's 4(x2),3: four tasks on each of two nodes, three on another
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # Open MPI, MPICH and Intel MPI, MVAPICH


class Launcher(NamedTuple):
    """What started this process, and its place among the processes of the run.

    Attributes:
        name: as it is typed.
        node, nodes: which machine this is, and how many there are, as the launcher counts.
        address, port: where rank 0 or its agent listens; None where nobody else is to be met.
        restarts: how often SLURM has started the job again, and torchrun's agent the processes after a failure.
        restarts_left: how often torchrun's agent will yet.
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

    @property
    def starts_all(self) -> bool:
        """Whether the launcher has started every process, so that Lightning starts none."""
        return self.name != OWN

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
        return self.name in (TORCHRUN, ACCELERATE) and not self.agent_listens

    @property
    def again(self) -> bool:
        """Whether the processes have been started again, or may have been."""
        return self.restarts > 0 or self.forgets

    def __str__(self) -> str:
        """Return a line of the log."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        again = f", started again {self.restarts} times" if self.restarts > 1 else ", started again" * self.restarts
        return f"{self.name}: {self.world_size} process{'es' * (self.world_size > 1)}{nodes}{again}"


def current() -> Launcher:
    """Return what has started this process. Raises UserError if the variables contradict each other, or one lacks."""
    return recognised(os.environ)


def is_batch_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a batch job's: all that `sbatch` starts has ENVIRONMENT=BATCH.

    Else it is what `srun` started, by the rule of Lightning's SLURMEnvironment. A shell on a node (`srun --pty bash`)
    is not a batch job: what is started there is treated as anywhere else.
    """
    if environment.get("ENVIRONMENT") == "BATCH" and "SLURM_JOB_ID" in environment:
        return True
    return "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def turns_before(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often SLURM has started this batch job before."""
    count = environment.get("SLURM_RESTART_COUNT", "0")
    return int(count) if is_batch_job(environment) and count.isascii() and count.isdigit() else 0


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one; also where the variables are wrong."""
    names = ("RANK", "LOCAL_RANK") if "LOCAL_RANK" in os.environ else ("RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def is_first_of_all() -> bool:
    """Return whether this process is the first by every variable: of two launchers, too."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def recognised(environment: Mapping[str, str]) -> Launcher:
    """Return the launcher that an environment is of.

    Raises UserError if two launchers have each started several processes, or if a variable is missing or no number.
    """
    read = _Variables(environment)
    found = read.launcher()
    found = found._replace(restarts=found.restarts + turns_before(environment))
    if read.problems:
        raise UserError(dict.fromkeys(read.problems))
    return found


class _Variables:
    """Reads an environment, and collects what is wrong with it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.problems: list[Problem] = []

    def launcher(self) -> Launcher:
        """Return the innermost launcher: torchrun may be started by srun, once on each node."""
        if "TORCHELASTIC_RUN_ID" in self.environment:
            return self._torchrun()
        tasks = self._tasks()
        if "RANK" in self.environment and self.environment.get("WORLD_SIZE", "1") != "1":
            return self._variables(tasks)
        if tasks > 1:
            return self._srun(tasks)
        for name in _MPI:
            if self._has_several(name):
                self._refuse(
                    f"mpirun has started {self.environment[name]} processes ({name}), and it is no launcher here: each "
                    "of them would be a run of its own",
                    "start them with torchrun --nproc-per-node N, or with srun",
                )
        return Launcher(OWN, rank=self._number("LOCAL_RANK", 0), local_rank=self._number("LOCAL_RANK", 0))

    def _torchrun(self) -> Launcher:
        """Read what torchrun's agent has set. Source: torch/distributed/run.py, "Environment Variables"."""
        name = ACCELERATE if "ACCELERATE_MIXED_PRECISION" in self.environment else TORCHRUN
        agents, tasks = self._number("GROUP_WORLD_SIZE", 1), self._tasks()
        if tasks > 1 and tasks != agents:
            several = "each a run of its own" if agents == 1 else f"which form a group of {agents}"
            self._refuse(
                f"two launchers at once: srun has started {tasks} tasks, and in each of them {name}, {several}",
                f"srun python ... without {name}; or one {name} a node, with --nnodes {tasks} and --rdzv-endpoint",
            )
        restarts = self._number("TORCHELASTIC_RESTART_COUNT", 0)
        return self._world(name)._replace(
            nodes=agents,
            node=self._number("GROUP_RANK", 0),
            restarts=restarts,
            restarts_left=max(self._number("TORCHELASTIC_MAX_RESTARTS", 0) - restarts, 0),
            agent_listens=self.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            local_world_size=self._number("LOCAL_WORLD_SIZE"),
        )

    def _variables(self, tasks: int) -> Launcher:
        """Read what a person, or a launcher that is not known here, has set for each process."""
        world = self._world(VARIABLES)
        if tasks > 1 and (world.rank, world.world_size) != (self._number("SLURM_PROCID"), tasks):
            said = f"RANK={self.environment['RANK']} of WORLD_SIZE={self.environment['WORLD_SIZE']}"
            self._refuse(
                f"two launchers at once: the variables say {said}, and srun says task "
                f"{self.environment.get('SLURM_PROCID')} of {tasks}",
                "unset RANK WORLD_SIZE for srun, or start the processes without srun",
            )
        local = max(self._number("LOCAL_WORLD_SIZE", world.world_size), 1)
        if world.world_size % local:
            cause = f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world.world_size}"
            self._refuse(cause, "start as many processes on each node")
        node = self._number("GROUP_RANK", world.rank // local)
        return world._replace(local_world_size=local, nodes=world.world_size // local, node=node)

    def _srun(self, tasks: int) -> Launcher:
        """Read what srun has set for each task of a step. Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"."""
        nodes = max(self._number("SLURM_STEP_NUM_NODES", 1), 1)
        counts = {
            int(count)
            for count, _ in _COUNTS.findall(self.environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks // nodes)))
        }
        if len(counts) > 1 or tasks % nodes:
            self._refuse(
                f"srun has started {tasks} tasks on {nodes} nodes, not as many on each: "
                f"SLURM_STEP_TASKS_PER_NODE={self.environment.get('SLURM_STEP_TASKS_PER_NODE')}",
                "srun --ntasks-per-node N",
            )
        job = self.environment.get("SLURM_JOB_ID", "0")
        return Launcher(
            SRUN,
            rank=self._number("SLURM_PROCID"),
            world_size=tasks,
            local_rank=self._number("SLURM_LOCALID"),
            local_world_size=tasks // nodes,
            node=self._number("SLURM_NODEID", 0),
            nodes=nodes,
            address=self.environment.get("MASTER_ADDR") or self._first_node(nodes),
            # Jobs on one node get different ports, and all tasks of a job the same one.
            port=self._number("MASTER_PORT", 15000 + int(job[-4:] if job.isdigit() else 0)),
        )

    def _first_node(self, nodes: int) -> str:
        """Return the first host of the step: `node[05-08,11]` begins with node05."""
        listed = self.environment.get("SLURM_STEP_NODELIST") or self.environment.get("SLURM_JOB_NODELIST", "")
        if not listed or nodes == 1:
            return "127.0.0.1"
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", listed)[0])

    def _tasks(self) -> int:
        """Return how many tasks srun has started with this one; 1 in a batch script, where no srun is involved."""
        return self._number("SLURM_STEP_NUM_TASKS", 1) if "SLURM_STEP_ID" in self.environment else 1

    def _world(self, name: str) -> Launcher:
        """Return rank, number of processes and the place to meet, of torch's own variables."""
        rank, world_size = self._number("RANK"), self._number("WORLD_SIZE")
        address = self.environment.get("MASTER_ADDR")
        if world_size > 1 and not address:
            self._refuse(
                f"MASTER_ADDR is not set, and {world_size} processes (WORLD_SIZE) have to meet there",
                "MASTER_ADDR=HOST MASTER_PORT=29500 before the command on every node: the host of rank 0",
            )
        if not self.problems and rank >= world_size:
            self._refuse(f"RANK={rank} is not below WORLD_SIZE={world_size}", "number the processes from 0")
        local_rank = self._number("LOCAL_RANK", 0 if world_size == 1 else None)
        port = self._number("MASTER_PORT", 29500)
        return Launcher(name, rank, world_size, local_rank, address=address, port=port)

    def _has_several(self, name: str) -> bool:
        value = self.environment.get(name, "")
        return value.isdigit() and int(value) > 1

    def _number(self, name: str, default: int | None = None) -> int:
        """Return a variable's number, and note if it lacks or is none."""
        value = self.environment.get(name)
        if value is None and default is not None:
            return default
        if value is None or not value.isascii() or not value.isdigit():
            said = "is not set" if value is None else f"is {value!a}, not a number"
            self._refuse(
                f"{name} {said}, and the variables say that this is one of several processes",
                f"set {name}, or start the processes with torchrun or srun, which set all of them",
            )
            return 1
        return int(value)

    def _refuse(self, cause: str, remedy: str) -> None:
        self.problems.append(Problem(cause, remedy))
