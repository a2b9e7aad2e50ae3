"""A folder to write to: whether it can be written, or made, and whether it is free. Nothing made stays."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import show


def check(path: str | Path, setting: str) -> list[Finding]:
    """Check that the folder of the key `setting` can be written, or made with its parents."""
    reason = _why_not(str(path))
    return [Finding.of(setting, f"{setting}={show(str(path))}: {reason}", f"{setting}=FOLDER")] if reason else []


def _why_not(path: str) -> str | None:
    if not path.strip() or not path.isprintable():
        return "is no path"
    try:
        folder = Path(path).expanduser().absolute()
        existing = next(above for above in (folder, *folder.parents) if os.path.lexists(above))
        reason = unwritable(existing)
        return reason and f"{existing} cannot be written: {reason}"
    except OSError as error:  # a name that is too long
        return error.strerror


def unwritable(folder: Path) -> str | None:
    """Try to write into an existing folder, and return why that fails; None if it works.

    os.access is wrong on network filesystems. It also does not see that there is no byte or inode left.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_untaken(folder: Path) -> list[Finding]:
    """Check that a fresh run may have a folder: its checkpoints would replace those of another run."""
    saved = sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))
    if not saved:
        return []
    remedy = "ckpt_path=last continues it; another run_name starts a new one"
    return [Finding.of("run_name", f"{folder} already holds a run, saved up to {saved[-1]}", remedy)]
