"""Places for jobs that run at the same time: a GPU each, or a share of the CPU. No two jobs have the same place.

A place is a file that is locked (`flock`). A process that is started with the descriptor holds the lock too. The kernel
releases it when the last holder has ended, however that was. So a place is free again after a SIGKILL, and never before
the job that had it is gone. Standard library only.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_DEVICE = re.compile(
    r"^(\s*)(?:GPU (\d+):|MIG\b.*\bDevice\s+(\d+):).*\(UUID: ((?:GPU|MIG)-[\w/-]+)\)\s*$", re.MULTILINE
)
_SECONDS = 30.0  # the longest that nvidia-smi may take


class Slot(NamedTuple):
    """A place that this process holds: its name, and the descriptor that keeps the lock."""

    name: str
    descriptor: int


def take(names: Sequence[str], folder: Path, devices: Mapping[str, str] = MappingProxyType({})) -> Slot | None:
    """Take the first of the places `names` that is free, or return None. Locks are files in `folder`. Raises OSError.

    Closing the descriptor gives the place back, unless a process has been started with it. Names of one place by others
    are told by `devices`: {name: what the lock goes by}.
    """
    for name in names:
        path = folder / f"{hashlib.sha256(devices.get(name, name).encode()).hexdigest()[:16]}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # nobody has cleaned the folder up meanwhile
                return Slot(name, descriptor)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that this process may use, each as CUDA_VISIBLE_DEVICES names one. CUDA is not touched.

    They are what CUDA_VISIBLE_DEVICES lists, or else every device that nvidia-smi lists. Neither: none.
    """
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        end = next((at for at, name in enumerate(names) if not name or name.startswith("-")), len(names))
        return list(dict.fromkeys(names[:end]))  # CUDA, too, reads no further than the first that is none
    return list(named(_listed()))


def devices(names: Sequence[str]) -> dict[str, str]:
    """Return {name: UUID} of the places `names` that nvidia-smi lists.

    Where a container or SLURM shows a job its own GPUs only, each of them begins at 0 in every job.
    """
    known = named(_listed())
    numbers = {called.removeprefix("GPU "): uuid for uuid, called in known.items()}
    found = {}
    for name in names:
        if (uuid := numbers.get(name) or _whole(name, known)) is not None:
            found[name] = uuid
    return found


def shown(names: Sequence[str]) -> dict[str, str]:
    """Return what a person calls the places `names`: `GPU 0`, as nvidia-smi numbers them, or the name itself."""
    known = named(_listed()) if any(name.startswith(("GPU-", "MIG-")) for name in names) else {}
    called = {}
    for name in names:
        uuid = _whole(name, known)
        called[name] = known[uuid] if uuid is not None else f"GPU {name}" if name.isdecimal() else name
    return called


def _whole(name: str, known: Iterable[str]) -> str | None:
    """Return the only UUID that begins with a name: CUDA_VISIBLE_DEVICES may have a shortened one."""
    whole = [uuid for uuid in known if uuid.startswith(name)]
    return whole[0] if len(whole) == 1 else None


def named(listed: str) -> dict[str, str]:
    """Return {UUID: `GPU 0` or `GPU 0 MIG 1`} of the devices in the text of `nvidia-smi -L`.

    A GPU that is cut into MIG devices is these, not itself.
    """
    found: dict[str, str] = {}
    gpu = ""
    for indent, number, part, uuid in _DEVICE.findall(listed):
        if indent and found and next(reversed(found)).startswith("GPU-"):
            found.popitem()
        if not indent:
            gpu = f"GPU {number}"
        found[uuid] = f"{gpu} MIG {part}" if indent else gpu
    return found


@functools.cache
def _listed() -> str:
    """Return the text of `nvidia-smi -L`; empty if there is none. A sweep asks for each of its jobs."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def shared_folder() -> Path:
    """Return this user's folder of locks of GPUs, so that two sweeps of a machine share them. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"gpt2_fp8-gpus-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder
