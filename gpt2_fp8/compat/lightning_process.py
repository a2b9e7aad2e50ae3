"""What Lightning does to its process: its rank, and its warnings.

Holds for `lightning>=2.6.6,<2.7`.
"""

from __future__ import annotations

import warnings

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only

_WARNINGS: dict[str, type[Warning]] = {
    # Our loader is sized, reads in its own worker processes, and its position is in the data module's state. Lightning
    # cannot see any of the three.
    ".*does not have many workers.*": PossibleUserWarning,
    "Your `IterableDataset` has `__len__` defined.*": UserWarning,
    ".*your dataloader is not resumable.*": UserWarning,
    # The last step of a run is always logged.
    "The number of training batches .* is smaller than the logging interval.*": PossibleUserWarning,
    ".*recommended to use `self.log\\('val_loss'.*": PossibleUserWarning,  # it is already the same on every rank
    # What else is on the machine says nothing about what was asked for. Under `srun` the ranks are its own.
    "The `srun` command is available on your system but is not used.*": PossibleUserWarning,
    "GPU available but not used.*": PossibleUserWarning,  # trainer=cpu
    ".*isinstance\\(treespec, LeafSpec\\).*": FutureWarning,  # Lightning 2.6 on torch 2.11 and later
}


def rank() -> int:
    """Return this process's rank, also before and after the process group exists.

    Lightning keeps it as an attribute of a function. Its public `Trainer.global_rank` needs a Trainer.
    """
    return int(getattr(rank_zero_only, "rank", 0))


def ignore_warnings() -> None:
    """Hide warnings of Lightning that are no fault here, by their texts and categories."""
    for message, category in _WARNINGS.items():
        warnings.filterwarnings("ignore", message=message, category=category)


def forks_or_spawns(launcher: object) -> bool:
    """Return whether a strategy's launcher trains in child processes, whose module the caller never sees."""
    return isinstance(launcher, _MultiProcessingLauncher)
