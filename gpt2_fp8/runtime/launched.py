"""Which rank this process has, as what started it says, before there is any process group."""

from __future__ import annotations

import os

_NAMES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")  # torchrun, SLURM, Lightning


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return next((os.environ[name] for name in _NAMES if name in os.environ), "0") == "0"
