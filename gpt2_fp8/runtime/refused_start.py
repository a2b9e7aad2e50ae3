"""A process whose variables are wrong tells the others so where they would wait for it, and they end within a minute.

Without a place to meet, rank 0 says what is wrong, and the first process of each other node.
"""

from __future__ import annotations

import os

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime import launched, launcher
from gpt2_fp8.runtime.launched import VARIABLES, Launcher
from gpt2_fp8.runtime.patience import NotMet
from gpt2_fp8.runtime.signal_handlers import Interrupted
from gpt2_fp8.runtime.variable_reader import VariableReader

MEET_SECONDS = 20.0  # in which rank 0 is to listen, or the others are to have heard
TELL_SECONDS = 25.0  # in which rank 0 is to say what another process is refused for
_MANY = 1_000_000  # processes, if it is not known how many


def tell(error: UserError) -> bool:
    """Tell the other processes of `error`, of this one's variables; return whether rank 0 says it, another process."""
    own = _own()
    if own is None:
        return _is_beside_rank_zero()
    from gpt2_fp8.runtime.attendance import Attendance  # imports torch
    from gpt2_fp8.runtime.meeting import everyones
    from gpt2_fp8.runtime.meeting_place import connected

    rank = own.rank if os.environ.get("RANK", "").isdigit() else None
    attendance = Attendance(rank)
    attendance.speaks = rank == 0
    try:
        store = everyones(connected(own, MEET_SECONDS))
        attendance.part(store, error, own.world_size - 1, MEET_SECONDS if rank == 0 else TELL_SECONDS)
    except (NotMet, Interrupted):  # rank 0 is not there: refused for the same, it would be
        return False
    return error.told


def _own() -> Launcher | None:
    """Return this process's place, as far as its variables say it; None where nobody can be met."""
    read = VariableReader(os.environ)
    address, port = read.address(), read.port(29500)
    if launched.agent(os.environ) or not address or read.problems:  # an agent ends the others itself
        return None
    if "RANK" not in read.environment and "WORLD_SIZE" not in read.environment:  # srun's, or mpirun's
        return None
    count = max(read.number("WORLD_SIZE", _MANY), 2)
    return Launcher(VARIABLES, read.number("RANK", 1), count, address=address, port=port)


def _is_beside_rank_zero() -> bool:
    """Return whether another process of this node says what this one is refused for, which it has by the same shell.

    With RANK alone there may be no other process.
    """
    if "RANK" not in os.environ:
        return not launcher.is_first_of_all()
    return os.environ.get("LOCAL_RANK", "1" if "WORLD_SIZE" in os.environ else "0") != "0"
