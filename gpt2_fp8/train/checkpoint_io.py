"""How Lightning's Trainer reads and writes the checkpoint folders."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from gpt2_fp8.checkpoint import files
from gpt2_fp8.compat.lightning_process import rank
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import duration

log = logging.getLogger(__name__)

_SLOW_SECONDS = 10.0  # from here on the log says how long the disk took
REMEDY = "add FolderCheckpointIO() to Trainer(plugins=[...])"


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
        begun = time.monotonic()
        checkpoint = files.read(path, map_location)
        if rank() == 0 and (seconds := time.monotonic() - begun) >= _SLOW_SECONDS:
            log.info("the checkpoint was read and checked in %s", duration(seconds))
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the folder `path`, if it is a checkpoint."""
        files.remove(path)


def pickles(trainer: pl.Trainer) -> bool:
    """Return whether a Trainer would save checkpoints in Lightning's own way, by pickling."""
    io: object = trainer.strategy.checkpoint_io
    while isinstance(io, AsyncCheckpointIO):
        io = io.checkpoint_io
    return isinstance(io, TorchCheckpointIO)


def refuse_pickles(trainer: pl.Trainer) -> None:
    """Have a Trainer that would pickle say so, with a remedy, once it is told to save or to load a checkpoint."""
    if pickles(trainer):
        trainer.strategy.checkpoint_io = _Refusing()


class _Refusing(TorchCheckpointIO):
    """Raises UserError where Lightning's own CheckpointIO would pickle or unpickle."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> NoReturn:
        """Refuse to save. Raises UserError."""
        raise UserError.of(f"{path} would be a pickle, which is not read here", REMEDY)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> NoReturn:
        """Refuse to load. Raises UserError."""
        raise UserError.of(f"{path} would be read as a pickle, and checkpoints here are folders", REMEDY)
