"""Variables of the environment that libraries read: those that they would fall over, and OpenMP's.

Standard library only. Only our programs change them: a process that imports this package keeps its environment.
"""

from __future__ import annotations

import os

# A notebook's kernel sets matplotlib's window for all that it starts. matplotlib, which Lightning imports, refuses one
# that is not installed. No program shows a window.
_FORGOTTEN = ("MPLBACKEND",)
# Lightning takes what its Trainer is not told from variables: a run has its settings from its command line alone.
_PREFIX = "PL_TRAINER_"


def settle() -> None:
    """Take them out of the environment, also of what this process starts. Call it before torch is imported.

    OpenMP's threads then sleep while they wait for each other, unless a variable says otherwise. A busy wait on a CPU
    with other work takes the time from the thread that it waits for: training was 3 times slower beside two busy
    programs on two cores, and sampling 20 times. On an idle CPU, sleeping costs training 6 %.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in [*_FORGOTTEN, *(name for name in os.environ if name.startswith(_PREFIX))]:
        os.environ.pop(name, None)
