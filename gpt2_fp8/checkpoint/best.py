"""Which checkpoint of a folder is the best one when a run begins there."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.errors import escaped
from gpt2_fp8.checkpoint.pointers import Pointer

log = logging.getLogger(__name__)


def reconciled(folder: Path, best: Pointer | None) -> Pointer | None:
    """Return what `best.json` names, or else `best`, which a checkpoint's state names and which may be older.

    If the file was changed, it is written again: from `best` and the validations noted beside the checkpoints. Returns
    None if no whole checkpoint is left of them. Raises OSError.
    """
    try:
        on_disk = pointers.follow(folder, "best")
        if files.is_checkpoint(folder / on_disk.checkpoint):
            return on_disk
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        best = min([*_noted(folder), *([best] if best else [])], key=_val_loss, default=None)
        log.warning("best.json is written again, from the checkpoints' validation.json: %s", escaped(str(error)))
    if best and files.is_checkpoint(folder / best.checkpoint):
        pointers.write(folder, "best", best)
        return best
    return None  # this folder's run has no best yet: the state may be another run's


def _noted(folder: Path) -> Iterator[Pointer]:
    """Yield the validations that are noted in the folder's whole checkpoints."""
    for path in pointers.steps(folder).values():
        with suppress(OSError, ValueError):
            noted = pointers.noted(path)
            if noted and noted.val_loss is not None and files.is_checkpoint(path):
                yield noted


def _val_loss(pointer: Pointer) -> float:
    return math.inf if pointer.val_loss is None else pointer.val_loss
