"""How Lightning's Trainer reads and writes the checkpoint folders."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from gpt2_fp8.checkpoint import files


class FolderCheckpointIO(CheckpointIO):
    """Saves and loads checkpoints as folders of safetensors and JSON, for `Trainer(plugins=[FolderCheckpointIO()])`.

    Nothing is pickled or unpickled.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` as the folder `path`, or give it to `storage_options`, a function (path, checkpoint).

        Lightning calls it only on global rank zero, with the `storage_options` of `Trainer.save_checkpoint`. Without a
        function, `files.write` does it: complete and durable when it returns.
        """
        write = files.write if storage_options is None else storage_options
        write(path, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the folder `path` (`files.read`). `weights_only` is about unpickling, which never happens here."""
        return files.read(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the folder `path`, if it is a checkpoint."""
        files.remove(path)


def write_folders(trainer: pl.Trainer) -> None:
    """Have a Trainer write and read folders where it would pickle, as Lightning does by itself."""
    io = trainer.strategy.checkpoint_io
    is_async = isinstance(io, AsyncCheckpointIO)
    inner = io.checkpoint_io if isinstance(io, AsyncCheckpointIO) else io
    if isinstance(inner, TorchCheckpointIO):
        folders = FolderCheckpointIO()
        trainer.strategy.checkpoint_io = AsyncCheckpointIO(folders) if is_async else folders
