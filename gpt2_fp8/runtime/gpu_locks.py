"""A lock for each GPU of this machine, so that two sweeps, of one user, share the GPUs. CUDA is not touched."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any


def list_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES or else nvidia-smi names them."""
    if (listed := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(_uuids())
    names = (name.strip() for name in listed.split(","))
    return list(takewhile(lambda name: name and not name.startswith("-"), names))  # CUDA, too, reads no further


def lock_gpu(environment: Mapping[str, str] = os.environ) -> tuple[str, Any] | None:
    """Lock the first free one of `list_gpus`; return it, and a context that holds the lock. Raises OSError."""
    from filelock import FileLock, Timeout

    folder = Path(tempfile.gettempdir()) / f"gpt2_fp8-gpus-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in list_gpus(environment):
        # in containers, and under SLURM, the GPUs of each job are numbered from 0
        called = re.sub(r"[^\w-]", "-", _uuids().get(name, name))
        lock = FileLock(folder / f"{called}.lock")
        with suppress(Timeout):
            return name, lock.acquire(blocking=False)
    return None


@functools.cache
def _uuids() -> dict[str, str]:
    """Return {index: UUID} of all GPUs; empty without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split(", ", 1) for line in listed.splitlines() if ", " in line)
