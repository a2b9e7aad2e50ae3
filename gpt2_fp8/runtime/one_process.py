"""The programs that are one process: started as several, each would do and print the same. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.runtime import foreign_variables, last_say, output, ranks


def main(name: str, program: Callable[[list[str]], int], pipe_ends: bool = False, once_a_node: bool = False) -> int:
    """Call `program` with this process's words, and return its exit code; 2 if it is started as several processes.

    Args:
        name: as it is typed.
        pipe_ends: see `output.begin`.
        once_a_node: whether it is about a machine, so that one process on each node is meant.
    """
    output.begin(pipe_ends)
    foreign_variables.settle()
    ranks.forget()
    try:
        place = ranks.current()
    except UserError as error:
        last_say.say(str(error))
        return 2
    if place.several and not (once_a_node and place.local_world_size == 1):
        if not place.rank:
            cause = f"{name} is one process, and {place.launcher} has started {place.world_size}"
            last_say.say(str(Problem(cause, f"python -m gpt2_fp8.{name} without {place.launcher}")))
        return 2
    return program(sys.argv[1:])
