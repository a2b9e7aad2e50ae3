"""Who started this process, and which of how many it is, as the environment says. Standard library only.

torchrun, `accelerate launch` (which uses torchrun's agent), srun, and anything else that sets RANK and WORLD_SIZE start
every process of a run. Otherwise there is one process, or Lightning starts the others from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime.launched import OWN, SRUN, Launcher
from gpt2_fp8.runtime.launcher_variables import MPI_RANKS, Variables

_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_READ_BY_LIGHTNING = (*_OF_ONE, "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT")


def current() -> Launcher:
    """Return what has started this process. Raises UserError if the variables contradict each other, or one lacks."""
    return recognised(os.environ)


def of_run() -> Launcher:
    """Return what has started this process, which is to train.

    Raises UserError as `current` does, and if variables say that it is one of several processes, but not which.
    """
    return recognised(os.environ, trains=True)


def forget_leftovers() -> None:
    """Take RANK, WORLD_SIZE and LOCAL_RANK out of the environment where another launcher counts, and what is empty.

    A container leaves RANK=0 of WORLD_SIZE=1 to the processes in it. Lightning reads them before it asks who they are,
    and the processes that it starts would take RANK for their own. Call it once, before Lightning is imported.
    """
    for name in _READ_BY_LIGHTNING:
        if os.environ.get(name) == "":  # no number for Lightning
            del os.environ[name]
    try:
        found = of_run()
    except UserError:  # half of what several processes have is no leftover
        return
    for name, value in _OF_ONE.items():
        if found.name == SRUN or (found.name == OWN and os.environ.get(name) == value):
            os.environ.pop(name, None)


def forget_several() -> None:
    """Take all of RANK, WORLD_SIZE and LOCAL_RANK out of the environment: this process is the only one.

    Lightning takes RANK for this process's own, and a word that is no number for an error.
    """
    for name in _OF_ONE:
        os.environ.pop(name, None)


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


def is_beside_first() -> bool:
    """Return whether another process is the first of this one's node; also where the variables are wrong."""
    names = ("LOCAL_RANK", "SLURM_LOCALID")
    return next((os.environ[name] for name in names if os.environ.get(name) and _counts(name)), "0") != "0"


def repeats() -> bool:
    """Return whether rank 0, another process, shows the same as this one. Not where the variables are wrong."""
    try:
        found = current()
    except UserError:
        return False
    return found.several and found.rank != 0


def is_first_of_all() -> bool:
    """Return whether this process is the first by every variable: of two launchers, too, and of mpirun."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK", *MPI_RANKS)
    return all(os.environ.get(name, "0") == "0" for name in names if _counts(name))


def _counts(name: str) -> bool:
    """Return whether a variable tells this process apart from others: a shell may have a LOCAL_RANK that is left."""
    return name != "LOCAL_RANK" or os.environ.get("WORLD_SIZE", "1") != "1" or "NODE_RANK" in os.environ


def recognised(environment: Mapping[str, str], trains: bool = False) -> Launcher:
    """Return the launcher that an environment is of.

    Raises UserError if two launchers have each started several processes, or if a variable is missing or no number.
    `trains`: a process that trains is also refused where only some of the variables are set.
    """
    read = Variables(environment)
    found = read.launcher()
    if trains and found.name == OWN and not read.problems:
        read.refuse_halves()
    found = found._replace(restarts=found.restarts + turns_before(environment))
    if read.problems:
        raise UserError(dict.fromkeys(read.problems))
    return found
