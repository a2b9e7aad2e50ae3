"""The programs that are one process: started as several, they would each do and print the same. Standard library only.

`run` alone trains in several processes, and is none of them.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.shown import line
from gpt2_fp8.runtime import foreign_variables, last_say, launcher, output
from gpt2_fp8.runtime.launched import BY_AGENT, SRUN, VARIABLES
from gpt2_fp8.runtime.launcher_variables import Variables, mpi_processes

_SHOWS = {"-h", "--help", "--version"}
_VARIABLES = "RANK WORLD_SIZE LOCAL_RANK"


def main(name: str, program: Callable[[list[str]], int], pipe_ends: bool = False, once_a_node: bool = False) -> int:
    """Call `program` with this process's words, and return its exit code; 2 if it is started as several processes.

    Args:
        name: as it is typed.
        pipe_ends: see `output.begin`.
        once_a_node: whether it is about a machine, so that one process on each node is meant.
    """
    output.begin(pipe_ends)
    foreign_variables.settle()
    words = sys.argv[1:]
    problem = refusal(name, words, os.environ, once_a_node)
    if problem is None:
        if not (once_a_node and Variables(os.environ).launcher().several):
            launcher.forget_several()
        return program(words)
    shows = not _SHOWS.isdisjoint(words)
    if not launcher.is_first_of_all():
        time.sleep(last_say.AFTER_SIGNAL_SECONDS)  # the first that ends has its launcher end the others
        return 0 if shows else 2
    if shows:
        return program(words)
    last_say.say(str(problem))
    return 2


def refusal(
    name: str, words: Sequence[str], environment: Mapping[str, str], once_a_node: bool = False
) -> Problem | None:
    """Return the problem of a program that something has started as several processes; None: nothing has."""
    found = Variables(environment).launcher()
    alone = shlex.join(["python", "-m", f"gpt2_fp8.{name}", *words])
    if not found.several:
        count = mpi_processes(environment)
        return _problem(name, f"mpirun has started {count}", f"{alone}, without mpirun") if count > 1 else None
    if once_a_node and found.local_world_size == 1:
        return None
    cause, remedy = f"{found.name} has started {found.world_size}", f"{alone}, without {found.name}"
    if found.name in BY_AGENT:
        remedy += f"; if the variables are left of another run: unset TORCHELASTIC_RUN_ID {_VARIABLES}"
    if found.name == VARIABLES:
        cause, remedy = f"RANK and WORLD_SIZE say {found.world_size}", f"unset {_VARIABLES}; {alone}"
    if found.name == SRUN:
        remedy = f"srun {'--ntasks-per-node' if once_a_node else '--ntasks'} 1 {alone}"
    return _problem(name, cause, remedy)


def _problem(name: str, cause: str, remedy: str) -> Problem:
    return Problem(f"{name} is one process, and {cause}", line(remedy))
