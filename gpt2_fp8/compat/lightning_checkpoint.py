"""How Lightning restores a checkpoint that it has read. Holds for `lightning>=2.6.6,<2.7`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

Restoring = Callable[[Any], AbstractContextManager[Any]]


def restore_within(trainer: pl.Trainer, restoring: Restoring) -> None:
    """Have `trainer` restore a checkpoint inside `restoring(path)`, which can explain an error.

    Lightning does it in two parts of `fit`, before and after the strategy's setup. No hook is called around them.
    """
    trainer._checkpoint_connector = _Connector(trainer, restoring)


class _Connector(_CheckpointConnector):
    def __init__(self, trainer: pl.Trainer, restoring: Restoring) -> None:
        super().__init__(trainer)
        self._restoring = restoring

    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        with self._restoring(checkpoint_path):
            super()._restore_modules_and_callbacks(checkpoint_path, weights_only)

    def restore_training_state(self) -> None:
        with self._restoring(self._ckpt_path):
            super().restore_training_state()
