"""Lightning's doors to the checkpoint folders: how it reads and writes one, and how it takes up what it has read."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.run_state import restoring


class FolderCheckpointIO(CheckpointIO):
    """Saves and loads checkpoints as folders of safetensors and JSON, for `Trainer(plugins=[FolderCheckpointIO()])`.
    Nothing is pickled or unpickled."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` as the folder `path`, or hand it to `storage_options`, a function (path, checkpoint).

        Lightning calls it on global rank zero alone, and passes on what `Trainer.save_checkpoint` was given. Without a
        function it is `files.write`: complete and durable when it returns.
        """
        if storage_options is not None and not callable(storage_options):
            raise TypeError("FolderCheckpointIO's storage_options is a function of a path and a checkpoint, or None")
        write = files.write if storage_options is None else storage_options
        write(path, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the folder `path` (`files.read`). `weights_only` is about unpickling, which never happens here."""
        return files.read(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the folder `path`, if it is a checkpoint."""
        files.remove(path)


def blame_checkpoints(trainer: pl.Trainer) -> None:
    """Have what goes wrong while `trainer` takes up a checkpoint told as the checkpoint's fault (`restoring`).

    Lightning 2.6 does that in two parts of `fit`, before and after the strategy's own setup, both in a private part.
    """
    trainer._checkpoint_connector = _Connector(trainer)


class _Connector(_CheckpointConnector):
    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        with restoring(checkpoint_path):
            super()._restore_modules_and_callbacks(checkpoint_path, weights_only)

    def restore_training_state(self) -> None:
        with restoring(self._ckpt_path):
            super().restore_training_state()
