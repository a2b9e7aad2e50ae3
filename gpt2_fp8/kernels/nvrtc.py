"""Kernels in CUDA C++ (`kernels/cuda/`), compiled at their first use by NVRTC through NVIDIA's `cuda.core`, and kept in
its cache on disk. For what Triton cannot say well: rows that stay in registers, and the copy engine."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).with_name("cuda")
SHARED_BYTES = 227 * 1024  # of one multiprocessor on Hopper, less 1 KiB for each block on it


@cache
def missing() -> str | None:
    """Why kernels in CUDA C++ cannot be compiled here, or None. Those who ask then have a kernel in Triton."""
    try:
        import_module("cuda.bindings.nvrtc").nvrtcVersion()
        import_module("cuda.core.utils").FileStreamProgramCache  # noqa: B018  (the youngest of what is used)
    except ImportError:
        return "cuda-core is not installed"
    except Exception as error:  # another version, or without the libraries that it loads
        return f"cuda-core does not work here ({type(error).__name__})"
    return None


class Kernel:
    """One kernel, compiled with its constants for one device; blocks of `threads` with `shared_bytes` each."""

    def __init__(self, name: str, constants: Mapping[str, int], device: int, threads: int, shared_bytes: int):
        from cuda.bindings import driver
        from cuda.core import Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache

        major, minor = torch.cuda.get_device_capability(device)
        options = ProgramOptions(
            std="c++17", arch=f"sm_{major}{minor}", define_macro=[(key, str(value)) for key, value in constants.items()]
        )
        source = "\n".join(_source(file) for file in ("common.cuh", f"{name}.cu"))
        try:
            cache_on_disk = FileStreamProgramCache()
        except OSError:  # a home directory that cannot be written: compiled anew in every process, a second each
            cache_on_disk = None
        compiled = Program(source, "c++", options).compile("cubin", cache=cache_on_disk)
        self._kernel = compiled.get_kernel(name)
        self._threads, self._shared_bytes = threads, shared_bytes
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self._kernel.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {shared_bytes} bytes of shared memory: {status.name}")

    def __call__(self, grid: int, *arguments: Tensor | int | float) -> None:
        """Launch `grid` blocks on the current stream. A tensor stands for its address, an int for C's int, a float for
        C's float."""
        from cuda.core import launch

        stream = _stream(torch.cuda.current_stream().cuda_stream)
        launch(stream, self._config(grid), self._kernel, *map(_argument, arguments))

    @cache  # noqa: B019  (a kernel lives as long as the process)
    def _config(self, grid: int) -> Any:
        from cuda.core import LaunchConfig

        return LaunchConfig(grid=grid, block=self._threads, shmem_size=self._shared_bytes)


def _source(file: str) -> str:
    """A file of `SOURCES`, with those that it includes: the cache on disk knows a program by its whole text."""
    text = (SOURCES / file).read_text()
    return re.sub(r'^#include "(.+)"$', lambda found: _source(found[1]), text, flags=re.MULTILINE)


@cache
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _argument(value: Tensor | int | float) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def kernel(name: str, constants: Mapping[str, int], device: torch.device, threads: int, shared_bytes: int) -> Kernel:
    """The kernel `name` of `cuda/NAME.cu`, compiled once. Raises RuntimeError, or cuda.core's own errors."""
    return _compiled(name, tuple((key, int(value)) for key, value in constants.items()), device, threads, shared_bytes)


@cache
def _compiled(
    name: str, constants: tuple[tuple[str, int], ...], device: torch.device, threads: int, shared_bytes: int
) -> Kernel:
    return Kernel(name, dict(constants), device.index, threads, shared_bytes)
