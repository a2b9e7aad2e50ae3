"""Kernels in CUDA C++ (`kernels/cuda/`), compiled at first use by NVRTC through NVIDIA's `cuda.core`.

Compiled kernels are kept in its cache on disk. CUDA C++ is for what Triton cannot express well: rows that stay in
registers, and the copy engine (TMA).
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).with_name("cuda")
SHARED_BYTES = 228 * 1024  # of a multiprocessor on Hopper; the system takes 1 KiB for each block


@cache
def why_missing() -> str | None:
    """Return why kernels in CUDA C++ cannot run on the current device; None if they can.

    The answer never changes in a process, since other layers round differently. A failure may be temporary, because
    ranks that start together share the cache on disk. So it is tried twice.
    """
    return _probe() and _probe()


def _probe() -> str | None:
    try:
        _compile('extern "C" __global__ void probe() {}', (), torch.cuda.current_device()).get_kernel("probe")
    except ModuleNotFoundError as error:
        if error.name in ("cuda", "cuda.core"):
            return "cuda-core is not installed"
        return f"cuda-core does not work here: {error}"
    except Exception as error:  # another version, missing libraries, or a driver that is too old
        return f"cuda-core does not work here: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _compile(source: str, constants: Iterable[tuple[str, int]], device: int) -> Any:
    """Compile CUDA C++, with constants as macros, for a device; or take the result from the cache on disk."""
    from cuda.core import Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache

    major, minor = torch.cuda.get_device_capability(device)
    macros = [(key, str(value)) for key, value in constants]
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"  # a: with features of only this architecture
    options = ProgramOptions(std="c++17", arch=arch, define_macro=macros or None)
    try:
        return Program(source, "c++", options).compile("cubin", cache=FileStreamProgramCache())
    # The home directory is full or cannot be written: compile again in every process, which takes a second.
    except OSError:
        return Program(source, "c++", options).compile("cubin")


class Kernel:
    """One kernel, compiled with its constants for one device, with blocks of `threads` and `shared_bytes` each."""

    def __init__(
        self, name: str, constants: tuple[tuple[str, int], ...], device: torch.device, threads: int, shared_bytes: int
    ):
        from cuda.bindings import driver

        self._kernel = _compile(source_of(name), constants, device.index).get_kernel(name)
        self._threads, self._shared_bytes, self._device = threads, shared_bytes, device.index
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self._kernel.handle, device.index)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {shared_bytes} bytes of shared memory: {status.name}")

    def __call__(self, grid: int, *arguments: Any) -> None:
        """Launch `grid` blocks on the current stream.

        A tensor is passed as its address, None as a null pointer, an int as C's int, a float as C's float. The copy
        engine's maps are passed unchanged. Raises RuntimeError if the kernel's device is not the current one, whose
        stream it would be launched on.
        """
        from cuda.core import launch

        if (current := torch.cuda.current_device()) != self._device:
            raise RuntimeError(f"tensors are on cuda:{self._device}, and the current device is cuda:{current}")
        if getattr(_thread, "device", None) != self._device:
            # torch gives a thread the device's context with its own first work there. But a launch through the driver
            # may come earlier: the first launch of a backward runs in one of autograd's threads.
            from cuda.core import Device

            Device(self._device).set_current()
            _thread.device = self._device
        stream = _stream(torch.cuda.current_stream().cuda_stream)
        launch(stream, self._config(grid), self._kernel, *map(_argument, arguments))

    @cache  # noqa: B019  (a kernel lives as long as the process)
    def _config(self, grid: int) -> Any:
        from cuda.core import LaunchConfig

        return LaunchConfig(grid=grid, block=self._threads, shmem_size=self._shared_bytes)


_thread = threading.local()  # its `device`: the one whose context the thread certainly has


def source_of(name: str) -> str:
    """Read a kernel with all that it includes."""
    return "\n".join(_source(file) for file in ("common.cuh", f"{name}.cu"))


def _source(file: str) -> str:
    """Read a file of `SOURCES` with its includes, since the cache on disk identifies a program by its whole text."""
    text = (SOURCES / file).read_text()
    return re.sub(r'^#include "(.+)"$', lambda found: _source(found[1]), text, flags=re.MULTILINE)


@cache
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _argument(value: Any) -> Any:
    """Convert an argument for the launch."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if value is None:
        return 0  # a null address
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int(value) if isinstance(value, int) else value


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> Any:
    """Describe to the copy engine how to find a box of `box` elements in a tensor: an argument of a kernel.

    The tensor may have any strides, but its last dimension is contiguous. In shared memory a box is swizzled by the
    size of its last dimension, 64 or 128 bytes.
    """
    from cuda.core import TensorMapDescriptorOptions
    from cuda.core.utils import StridedMemoryView

    swizzles = type(TensorMapDescriptorOptions(box).swizzle)  # the only public way to them
    swizzle = getattr(swizzles, f"SWIZZLE_{box[-1] * tensor.element_size()}B")
    return StridedMemoryView.from_dlpack(tensor, stream_ptr=-1).as_tensor_map(box, swizzle=swizzle)


@cache
def processors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def kernel(name: str, constants: Mapping[str, int], device: torch.device, threads: int, shared_bytes: int) -> Kernel:
    """Return the kernel `name` of `cuda/NAME.cu`, compiled once. Raises RuntimeError, or cuda.core's own errors."""
    return _kernel(name, tuple((key, int(value)) for key, value in constants.items()), device, threads, shared_bytes)


_kernel = cache(Kernel)
