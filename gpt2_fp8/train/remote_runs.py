"""The names of a run at W&B and MLflow, in the run's folder: a resumed run is the same run there."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config import json_file

FILE = "remote_runs.json"
_WRITING = threading.Lock()  # each service has a thread
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def remembered(folder: Path, service: str) -> str | None:
    """Return the identifier of the run at a service; None if there is none, or it is not one."""
    return _read(folder).get(service)


def remember(folder: Path, service: str, name: str) -> None:
    """Note an identifier. Raises OSError."""
    with _WRITING:
        durable.write_json(folder / FILE, _read(folder) | {service: name})


def fresh(environment: Mapping[str, str] = os.environ) -> str:
    """Return an identifier for a new run at W&B: that of its sweep's agent, or eight characters drawn at random.

    They are drawn by the operating system: the run's own random numbers stay as they are.
    """
    given = environment.get("WANDB_RUN_ID", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(4)


def _read(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        found = json_file.read(folder / FILE)
        if isinstance(found, dict):
            return {str(key): value for key, value in found.items() if isinstance(value, str) and _ID.fullmatch(value)}
    return {}
