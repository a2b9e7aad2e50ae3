"""The versions that a measurement ran on, as far as they are known."""

from __future__ import annotations

import platform
import shutil
import subprocess
from contextlib import suppress
from importlib import metadata

import torch

from gpt2_fp8 import __version__
from gpt2_fp8.kernels import libraries


def versions() -> dict[str, str]:
    """Return the versions of the libraries, of CUDA and of the driver, by name; what is missing is left out."""
    found = {"gpt2_fp8": __version__, "python": platform.python_version(), "torch": torch.__version__}
    with suppress(metadata.PackageNotFoundError):
        found["lightning"] = metadata.version("lightning")
    found |= libraries.versions()
    if driver := _driver():
        found["driver"] = driver
    return found


def _driver() -> str | None:
    """Return the NVIDIA driver's version; None if it is not known."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return next(iter(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()), None)
    return None
