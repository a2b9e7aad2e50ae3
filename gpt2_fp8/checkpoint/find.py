"""From `ckpt_path=last|best|PATH` to a folder that can be read. Changes nothing on the disk."""

from __future__ import annotations

import logging
from pathlib import Path

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.manifest import CheckpointError, is_checkpoint, read_manifest

log = logging.getLogger(__name__)


def resolve(ckpt_path: str, checkpoints_dir: Path) -> Path | None:
    """The checkpoint that `ckpt_path` means for the run whose checkpoints lie in `checkpoints_dir`.

    last: where `last.json` points; if that cannot be read, the readable folder of the highest step, said so in the
    log. None: there is no checkpoint at all, so that the run starts afresh.
    best: where `best.json` points. Anything else is a path.

    Raises CheckpointError: nothing readable is left, there is no best, or the path is no checkpoint.
    """
    if ckpt_path == "last":
        return _last(checkpoints_dir)
    if ckpt_path == "best":
        return _best(checkpoints_dir)
    path = Path(ckpt_path).expanduser()
    read_manifest(path)
    return path


def _last(folder: Path) -> Path | None:
    pointer = pointers.read(folder, "last")
    if pointer and is_checkpoint(folder / pointer.checkpoint):
        return folder / pointer.checkpoint
    candidates = _candidates(folder)
    for path in candidates:
        if is_checkpoint(path):
            log.warning("%s does not lead to a readable checkpoint; %s is the newest", folder / "last.json", path.name)
            return path
    if not candidates and not (folder / "last.json").exists():
        return None
    names = ", ".join(path.name for path in candidates) or "none is left"
    raise CheckpointError.of(
        f"no checkpoint in {folder} can be read ({names})",
        "restore one from a copy, or start afresh under another run_name",
    )


def _best(folder: Path) -> Path:
    pointer = pointers.read(folder, "best")
    if pointer is None:
        raise CheckpointError.of(
            f"{folder} has no best checkpoint: no validation of this run has given a finite loss yet",
            "use ckpt_path=last, or the path of a checkpoint",
        )
    read_manifest(folder / pointer.checkpoint)
    return folder / pointer.checkpoint


def _candidates(folder: Path) -> list[Path]:
    """Folders that may be checkpoints, the highest step first; one that a killed writer moved aside counts too."""
    found = [(step, 1, path) for step, path in pointers.steps(folder).items()]
    for path in folder.glob(".step-*.old"):
        step = pointers.step_of(path.stem.removeprefix("."))
        if step is not None:
            found.append((step, 0, path))
    return [path for _, _, path in sorted(found, reverse=True)]
