"""Reads variables: what each launcher sets, and what cannot be. Standard library only.

A launcher is recognised by its variables, so there is no key for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpt2_fp8.runtime import rank_zero_address
from gpt2_fp8.runtime.launched import BY_AGENT, OWN, SRUN, TORCHRUN, VARIABLES, Launcher, agent
from gpt2_fp8.runtime.variable_reader import VariableReader

_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # SLURM's 4(x2),3: four tasks on each of two nodes, three on another
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_AGENTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # Open MPI, MPICH and Intel MPI, MVAPICH


def mpi_processes(environment: Mapping[str, str]) -> int:
    """Return how many processes mpirun has started with this one; 1 where it has not."""
    counts = (environment.get(name, "") for name in _MPI)
    return max((int(count) for count in counts if count.isascii() and count.isdigit()), default=1)


class Variables(VariableReader):
    """Reads an environment, and collects what is wrong with it."""

    def launcher(self) -> Launcher:
        """Return the innermost launcher: torchrun may be started by srun, once on each node."""
        if name := agent(self.environment):
            return self._torchrun(name)
        tasks = self._tasks()
        if "RANK" in self.environment and self.environment.get("WORLD_SIZE", "1") != "1":
            return self._variables(tasks)
        if tasks > 1:
            return self._srun(tasks)
        if (count := mpi_processes(self.environment)) > 1:
            self.refuse(
                f"mpirun has started {count} processes, and it is no launcher here: each of them would be a run of its "
                "own",
                "start them with torchrun --nproc-per-node N, or with srun",
            )
        return Launcher(OWN, rank=self.number("LOCAL_RANK", 0), local_rank=self.number("LOCAL_RANK", 0))

    def refuse_halves(self) -> None:
        """Note variables that say one of several processes, where the others that belong to them lack.

        Lightning's own processes, and one that it is started in on each of several nodes, have NODE_RANK. What a
        container or a scheduler leaves to a single process says rank 0, or one process.
        """
        rank, count, local = (self.environment.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        lightnings = "NODE_RANK" in self.environment
        one = count in (None, "1")
        if one and (
            rank not in (None, "0") or (rank and not count and not lightnings and "MASTER_ADDR" in self.environment)
        ):
            self._refuse_half("RANK", "WORLD_SIZE")
        elif rank is None and not one and not lightnings:
            self._refuse_half("WORLD_SIZE", "RANK")
        elif rank is None and one and local not in (None, "0") and not lightnings:
            self._refuse_half("LOCAL_RANK", "WORLD_SIZE")

    def _refuse_half(self, name: str, other: str) -> None:
        value = self.environment.get(other)
        lacks = "is not set" if value is None else f"is {value}"
        self.refuse(
            f"{name}={self.environment[name]}, which one of several processes has, and {other} {lacks}",
            "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, as torchrun does; or "
            f"unset {name}, for a run of one",
        )

    def _torchrun(self, name: str) -> Launcher:
        """Read what torchrun's agent has set. Source: torch/distributed/run.py, "Environment Variables"."""
        agents, tasks = self.number("GROUP_WORLD_SIZE", 1), self._tasks()
        if lacking := [each for each in _AGENTS if each not in self.environment]:
            self.refuse(
                f"TORCHELASTIC_RUN_ID is set, as by {name}, which would have set {' and '.join(lacking)} too",
                f"unset TORCHELASTIC_RUN_ID RANK WORLD_SIZE LOCAL_RANK, which are left of another run; or {name}",
            )
            return Launcher(name)
        if tasks > 1 and agents == 1 and self._is_agent_alone():
            self.refuse(
                f"two launchers at once: srun has started {tasks} tasks, and in each of them {name} a run of its own",
                f"srun python ... without {name}; or one {TORCHRUN} a node, with --nnodes {tasks} --rdzv-backend c10d "
                "--rdzv-endpoint HOST:29500 --rdzv-id NAME",
            )
        restarts = self.number("TORCHELASTIC_RESTART_COUNT", 0)
        return self._world(name)._replace(
            nodes=agents,
            node=self.number("GROUP_RANK", 0),
            restarts=restarts,
            restarts_left=max(self.number("TORCHELASTIC_MAX_RESTARTS", 0) - restarts, 0),
            agent_listens=self.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            local_world_size=self.number("LOCAL_WORLD_SIZE"),
        )

    def _is_agent_alone(self) -> bool:
        """Return whether torchrun's only agent was started alone, not left by others of an elastic group.

        In torch 2.13 an agent alone makes up an id, or with `--master-port` its store is at 127.0.0.1. A group has the
        id that was typed for all, and the name of a host.
        """
        made_up = _UUID.fullmatch(self.environment["TORCHELASTIC_RUN_ID"]) is not None
        return made_up or self.environment.get("MASTER_ADDR") == "127.0.0.1"

    def _variables(self, tasks: int) -> Launcher:
        """Read what a person, or a launcher that is not known here, has set for each process."""
        world = self._world(VARIABLES)
        if tasks > 1 and (world.rank, world.world_size) != (self.number("SLURM_PROCID"), tasks):
            said = f"RANK={self.environment['RANK']} of WORLD_SIZE={self.environment['WORLD_SIZE']}"
            self.refuse(
                f"two launchers at once: the variables say {said}, and srun says task "
                f"{self.environment.get('SLURM_PROCID')} of {tasks}",
                "unset RANK WORLD_SIZE for srun, or start the processes without srun",
            )
        local = max(self.number("LOCAL_WORLD_SIZE", world.world_size), 1)
        if world.world_size % local:
            cause = f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world.world_size}"
            self.refuse(cause, "start as many processes on each node")
        if not self.problems and world.local_rank >= local:
            said = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in self.environment else "WORLD_SIZE"
            self.refuse(
                f"LOCAL_RANK={world.local_rank} is not below {said}={local}", "number the processes of a node from 0"
            )
        node = self.number("GROUP_RANK", world.rank // local)
        return world._replace(local_world_size=local, nodes=world.world_size // local, node=node)

    def _srun(self, tasks: int) -> Launcher:
        """Read what srun has set for each task of a step. Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"."""
        nodes = max(self.number("SLURM_STEP_NUM_NODES", 1), 1)
        counts = {
            int(count)
            for count, _ in _COUNTS.findall(self.environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks // nodes)))
        }
        if len(counts) > 1 or tasks % nodes:
            self.refuse(
                f"srun has started {tasks} tasks on {nodes} nodes, not as many on each: "
                f"SLURM_STEP_TASKS_PER_NODE={self.environment.get('SLURM_STEP_TASKS_PER_NODE')}",
                "srun --ntasks-per-node N",
            )
        job, step = self.environment.get("SLURM_JOB_ID", "0"), self.environment["SLURM_STEP_ID"]
        number = int(job[-4:] if job.isdigit() else 0) + 1009 * int(step if step.isdigit() else 0)
        return Launcher(
            SRUN,
            rank=self.number("SLURM_PROCID"),
            world_size=tasks,
            local_rank=self.number("SLURM_LOCALID"),
            local_world_size=tasks // nodes,
            node=self.number("SLURM_NODEID", 0),
            nodes=nodes,
            address=self.address() or self._first_node(nodes),
            # Jobs on one node, and steps of a job, get different ports, and all tasks of a step the same one.
            port=self.port(15000 + number % 10000),
            step=f"{job}.{step}",
        )

    def _first_node(self, nodes: int) -> str:
        """Return the first host of the step: `node[05-08,11]` begins with node05."""
        listed = self.environment.get("SLURM_STEP_NODELIST") or self.environment.get("SLURM_JOB_NODELIST", "")
        if not listed or nodes == 1:
            return "127.0.0.1"
        return rank_zero_address.first_of(listed)

    def _tasks(self) -> int:
        """Return how many tasks srun has started with this one; 1 in a batch script, where no srun is involved."""
        return self.number("SLURM_STEP_NUM_TASKS", 1) if "SLURM_STEP_ID" in self.environment else 1

    def _world(self, name: str) -> Launcher:
        """Return rank, number of processes and the place to meet, of torch's own variables."""
        rank, world_size = self.number("RANK"), self.number("WORLD_SIZE")
        address = self.environment.get("MASTER_ADDR") if name in BY_AGENT else self.address()
        if world_size > 1 and not address:
            self.refuse(
                f"MASTER_ADDR is not set, and {world_size} processes (WORLD_SIZE) have to meet there",
                "MASTER_ADDR=HOST MASTER_PORT=29500 before the command on every node: the host of rank 0",
            )
        if not self.problems and not world_size:
            self.refuse("WORLD_SIZE=0, and this is a process", "unset WORLD_SIZE RANK, for a run of one")
        elif not self.problems and rank >= world_size:
            self.refuse(f"RANK={rank} is not below WORLD_SIZE={world_size}", "number the processes from 0")
        local_rank = self.number("LOCAL_RANK", 0 if world_size == 1 else None)
        port = self.port(29500)
        return Launcher(name, rank, world_size, local_rank, address=address, port=port)
