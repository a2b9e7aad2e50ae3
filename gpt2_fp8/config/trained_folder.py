"""The folder of a trained model, as `generate` and `evaluate` are given it: a run's, or a checkpoint's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show

Which = Literal["last", "best"]
EXAMPLES = "ckpt_path=outputs/RUN, or a checkpoint's folder: ckpt_path=outputs/RUN/checkpoints/step-NNNNNNNN"


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's, with checkpoints below it."""
    return os.path.isdir(path / "checkpoints")


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
    elif not os.path.lexists(path / "manifest.json"):
        what = "it has neither checkpoints, as a run's folder, nor a manifest.json, as a checkpoint's"
        yield Problem(f"{said}: {what}", EXAMPLES)
    elif which == "best":
        yield Problem(f"checkpoint=best chooses among a run's checkpoints, and {said} is one", "leave checkpoint out")
