"""A folder to write to: whether it can be written, or made, and whether it is free. Nothing made stays."""

from __future__ import annotations

import os
from pathlib import Path

from gpt2_fp8.config import run_folder
from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import show


def check(path: str | Path, setting: str, key: str | None = None) -> list[Finding]:
    """Check that a folder can be written, or made with its parents.

    `setting` is the key that holds it. `key` is the key that the user gave.
    """
    key = key or setting
    if reason := _no_path(str(path)):
        return [Finding.of(key, f"{setting}={show(str(path))}: {reason}", f"choose a folder: {setting}=FOLDER")]
    path = Path(path).expanduser()
    existing = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    remedy = f"choose a folder that can be written: {setting}=FOLDER"
    if not os.path.isdir(existing):
        return [Finding.of(key, f"{setting}={show(str(path))}: {existing} {run_folder.no_folder(existing)}", remedy)]
    if reason := run_folder.unwritable(existing):
        return [Finding.of(key, f"{setting}={show(str(path))}: {existing} cannot be written: {reason}", remedy)]
    return []


def _no_path(path: str) -> str | None:
    """Return why a text cannot be the path of a folder, whatever exists; None if it can."""
    if not path.strip():
        return "is empty"
    if not path.isprintable():
        return "has control characters"
    too_long = any(len(os.fsencode(part)) > 255 for part in Path(path).parts) or len(os.fsencode(path)) > 4000
    return "is too long for a path" if too_long else None


def check_untaken(folder: Path) -> list[Finding]:
    """Check that a fresh run may have a folder: its checkpoints would replace those of another run."""
    saved = sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))
    if not saved:
        return []
    remedy = "ckpt_path=last continues it; another run_name starts a new one"
    return [Finding.of("run_name", f"{folder} already holds a run, saved up to {saved[-1]}", remedy)]
