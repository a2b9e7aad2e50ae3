"""Records what a build or a loader finds: compilers, headers, cuDNN's libraries. Never raises."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from gpt2_fp8.diagnose.commands import output_of
from gpt2_fp8.diagnose.facts import Build

ROOT = Path("/")  # where the system's own files are


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
