"""The folder of a trained model, as `generate` and `evaluate` are given it: a run's, or a checkpoint's."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gpt2_fp8.config import hf_check
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show

Which = Literal["last", "best"]
EXAMPLES = "ckpt_path=outputs/RUN, or a checkpoint's folder: ckpt_path=outputs/RUN/checkpoints/step-NNNNNNNN"


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's, with checkpoints below it."""
    return os.path.isdir(path / "checkpoints")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder may be a checkpoint's."""
    return os.path.lexists(path / "manifest.json")


def why_not(path: Path) -> str | None:
    """Return why an existing folder holds no model of this program, as part of a sentence; None if it may."""
    if is_run(path) or is_checkpoint(path):
        return None
    if hf_check.is_folder(path):
        return "it is a Hugging Face folder, and no checkpoint"
    return "it has neither checkpoints, as a run's folder, nor a manifest.json, as a checkpoint's"


def from_hugging_face(path: str) -> str:
    """Say how a Hugging Face folder becomes a checkpoint that the programs take."""
    return f"python -m gpt2_fp8.import_hf {shlex.quote(path)} FOLDER makes a checkpoint of it, for ckpt_path=FOLDER"


def check(ckpt_path: str | None, which: Which) -> Iterator[Problem]:
    """Find what is wrong with `ckpt_path` and `checkpoint`, as far as the names of files tell."""
    if not ckpt_path:
        yield Problem(f"ckpt_path is {'empty' if ckpt_path == '' else 'missing'}: it names the model", EXAMPLES)
        return
    path, said = Path(ckpt_path).expanduser(), f"ckpt_path={show(ckpt_path)}"
    if "\0" in ckpt_path or not os.path.isdir(path):
        what = "is a file" if "\0" not in ckpt_path and os.path.exists(path) else "does not exist"
        yield Problem(f"{said}: {what} (looked in {Path.cwd()})", EXAMPLES)
    elif is_run(path):
        return
    elif hf_check.is_folder(path):
        yield Problem(f"{said}: {why_not(path)}", from_hugging_face(ckpt_path))
    elif why := why_not(path):
        yield Problem(f"{said}: {why}", EXAMPLES)
    elif which == "best":
        yield Problem(f"checkpoint=best chooses among a run's checkpoints, and {said} is one", "leave checkpoint out")
