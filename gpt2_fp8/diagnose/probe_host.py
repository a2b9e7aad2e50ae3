"""Records what the host says: system, packages, variables, folders. Never raises."""

from __future__ import annotations

import getpass
import os
import platform
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from gpt2_fp8.diagnose.facts import Library, Place, System

ROOT = Path("/")  # where the system's own files are
# Some builds of torch bring Triton under another name.
PACKAGES = {
    "torch": ("torch",),
    "transformer-engine": ("transformer-engine",),
    "torchao": ("torchao",),
    "flash-attn": ("flash-attn", "flash-attn-3"),
    "flash-attn-4": ("flash-attn-4",),
    "cuda-core": ("cuda-core",),
    "triton": ("triton", "pytorch-triton"),
}
# Variables that decide what computes; no other variable is recorded, since a report may be sent to others.
_VARIABLES = re.compile(r"(NVTE|CUDNN|TRITON|TORCHINDUCTOR|NCCL)_\w+|CUDA_(VISIBLE_DEVICES|HOME|PATH|LAUNCH_BLOCKING)")
_MORE_VARIABLES = {"LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CUDA_ARCH_LIST"}


def system() -> System:
    """Record the host."""
    shared = None
    with suppress(OSError):
        found = os.statvfs(ROOT / "dev/shm")
        shared = found.f_frsize * found.f_blocks
    return System(
        platform=f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver()).strip() or 'no glibc'}",
        machine=platform.machine(),
        python=platform.python_version(),
        container=_in_container(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_left=None,
        memory_limit=None,
        shared_memory=shared,
    )


def _in_container() -> bool:
    """Return whether Docker, Podman, Kubernetes or Singularity has started this process."""
    files = [".dockerenv", "run/.containerenv", ".singularity.d"]
    return any((ROOT / name).exists() for name in files) or "KUBERNETES_SERVICE_HOST" in os.environ


def environment() -> dict[str, str]:
    """Return the variables that change how FP8 runs."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name) or name in _MORE_VARIABLES
    }


def libraries() -> dict[str, Library]:
    """Record the packages by name: the version that is installed, and the versions that this project takes."""
    wanted = _wanted()
    return {
        name: Library(version=_installed(names), wanted=wanted.get(name), error=None)
        for name, names in PACKAGES.items()
    }


def _installed(names: Iterable[str]) -> str | None:
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _wanted() -> dict[str, str]:
    """Return which versions of each package this project requires, from its own metadata."""
    try:
        lines = metadata.requires("gpt2-fp8") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return {}
    found: dict[str, str] = {}
    for line in lines:
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            if requirement.specifier:
                found.setdefault(requirement.name, str(requirement.specifier))
    return found


def places() -> dict[str, Place]:
    """Record the folders that a run writes to, and those that could take a cache instead."""
    home = Path(os.path.expanduser("~"))
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as containers have
        user = str(os.getuid())
    temporary = Path(tempfile.gettempdir())
    named = {
        "Triton's cache": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton/cache"),
        "torch.compile's cache": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or temporary / f"torchinductor_{user}"),
        "outputs": Path("outputs"),
        "the temporary folder": temporary,
    }
    return {name: _place(path) for name, path in named.items()}


def _place(path: Path) -> Place:
    path = Path(os.path.abspath(path))
    there = path
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    free, executable = None, True
    with suppress(OSError):
        found = os.statvfs(there)
        free, executable = found.f_bavail * found.f_frsize, not found.f_flag & getattr(os, "ST_NOEXEC", 0)
    writable = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    return Place(path=str(path), free=free, writable=writable, executable=executable)
