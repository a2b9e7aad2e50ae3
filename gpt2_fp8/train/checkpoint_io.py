"""How Lightning's Trainer reads and writes the checkpoint folders."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO

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
