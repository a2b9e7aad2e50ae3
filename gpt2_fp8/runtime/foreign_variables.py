"""Variables that another program has left in the environment, and that a library would fall over.

Standard library only. Only our programs forget them: a process that imports this package keeps its environment.
"""

from __future__ import annotations

import os

# A notebook's kernel sets matplotlib's window for all that it starts. matplotlib, which Lightning imports, refuses one
# that is not installed. No program shows a window.
_FORGOTTEN = ("MPLBACKEND",)
# Lightning takes what its Trainer is not told from variables: a run has its settings from its command line alone.
_PREFIX = "PL_TRAINER_"


def forget() -> None:
    """Take them out of the environment, also of what this process starts. Call it before Lightning is imported."""
    for name in [*_FORGOTTEN, *(name for name in os.environ if name.startswith(_PREFIX))]:
        os.environ.pop(name, None)
