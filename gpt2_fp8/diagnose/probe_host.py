"""Records what the host says: system, compilers, headers, packages, variables, folders. Never raises."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from gpt2_fp8.diagnose.facts import Build, Library, Place, System
from gpt2_fp8.runtime import memory_limits

SECONDS = 20.0  # that a command may take
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


def output_of(*command: str) -> tuple[str, str | None]:
    """Return what a command prints, and why it failed in one line; None if it did not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return "", " ".join(str(error).split())
    if done.returncode == 0:
        return done.stdout, None
    return done.stdout, " ".join((done.stderr or done.stdout).split())[:300] or f"exit code {done.returncode}"


def system() -> System:
    """Record the host."""
    limit = memory_limits.narrowest()
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
        memory=memory_limits.machine_bytes(),
        memory_left=limit.left if limit else None,
        memory_limit=limit.what if limit else None,
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


def build() -> Build:
    """Record compilers and headers."""
    cc = _which(os.environ.get("CC"), "cc", "gcc", "clang")
    cxx = _which(os.environ.get("CXX"), "c++", "g++", "clang++")
    nvcc = _which(*(str(folder / "bin/nvcc") for folder in _toolkits()), "nvcc")
    release = re.search(r"release ([\d.]+)", output_of(nvcc, "--version")[0]) if nvcc else None
    include = sysconfig.get_paths().get("include", "")
    return Build(
        cc=cc,
        cxx=cxx,
        cxx_version=next(iter(output_of(cxx, "--version")[0].splitlines()), None) if cxx else None,
        nvcc=nvcc,
        nvcc_version=release[1] if release else None,
        python_h=_first([Path(include)], "Python.h"),
        cuda_runtime_h=_first(_includes(_toolkits()), "cuda_runtime.h"),
        cudnn_h=_first(_includes([*cudnn_homes(), *_toolkits()]), "cudnn.h"),
    )


def _which(*names: str | None) -> str | None:
    """Return the path of the first command that is there. A variable such as CC may hold a command with arguments."""
    found = (shutil.which(name.split()[0]) for name in names if name and name.strip())
    return next(filter(None, found), None)


def cudnn_homes() -> list[Path]:
    """Return the folders that the environment names as cuDNN's."""
    return [Path(os.environ[name]) for name in ("CUDNN_HOME", "CUDNN_PATH") if os.environ.get(name)]


def _toolkits() -> list[Path]:
    """Return the folders where a CUDA toolkit may be, in the order in which builds look."""
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        named.append(Path(os.path.realpath(nvcc)).parents[1])
    return [*named, ROOT / "usr/local/cuda", *wheels("cu*"), *wheels("cuda_runtime")]


def _includes(folders: Iterable[Path]) -> list[Path]:
    return [*(folder / "include" for folder in folders), ROOT / "usr/include", *_debian(), *wheels("cudnn/include")]


def _debian() -> list[Path]:
    """Return the folder of Debian's headers for this processor."""
    return [ROOT / f"usr/include/{platform.machine()}-linux-gnu"]


def wheels(pattern: str) -> list[Path]:
    """Return the folders of NVIDIA's packages from pip that match `pattern`, below site-packages/nvidia."""
    roots = {Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")}
    return [folder for root in sorted(roots) for folder in sorted(root.glob(f"nvidia/{pattern}"))]


def _first(folders: Iterable[Path], name: str) -> str | None:
    """Return the path of the first file of that name."""
    for folder in folders:
        with suppress(OSError):
            if (folder / name).is_file():
                return str(folder / name)
    return None


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


def preferred(pattern: str) -> list[Path]:
    """Return the libraries that the environment puts before torch's own, in the loader's order."""
    folders = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    folders += [home / name for home in cudnn_homes() for name in ("lib", "lib64")]
    return [path for folder in folders for path in sorted(folder.glob(pattern))]


def version_of_wheel(start: str) -> str | None:
    """Return the version of the first package whose name begins with `start`, as nvidia-cudnn-cu13."""
    for package in metadata.distributions():
        with suppress(KeyError, TypeError):  # a folder that a broken installation left
            if package.metadata["Name"].startswith(start):
                return package.version
    return None
