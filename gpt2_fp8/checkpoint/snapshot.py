"""A copy of a run's state in host memory. It is written later, while training changes the original.

A GPU copies at the full speed of its bus to page-locked memory alone. Locking takes several times as long as the copies
that it makes fast, so a thread does it while nothing waits. The memory is mapped and registered here: torch's own
allocator (`pin_memory=True`) rounds 18.7 GB up to 32, and returns nothing while the process lives.
"""

from __future__ import annotations

import copy
import logging
import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.checkpoint import tree
from gpt2_fp8.runtime.sharding import local

log = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 256  # a multiple of every dtype's size, and a good alignment for copies


def room(tensor: Tensor) -> int:
    """Return the bytes that `Pinned.empty_like` takes for `tensor`."""
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Pinned:
    """Tensors in one region of page-locked memory, handed out one after the other.

    If no pages can be locked, one warning says so, and the tensors are in ordinary memory. The end of this object also
    unlocks the region. Its memory lives as long as the tensors in it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._region: mmap.mmap | None = None
        self._unlock: weakref.finalize | None = None
        self._used = 0  # bytes
        self._refused = False

    def reserve(self, size: int, device: torch.device) -> None:
        """Begin to lock `size` bytes (at least one) for the GPU `device`; returns at once.

        Nothing happens if a region exists, is being made, or was refused before. Do not call it while another thread
        records a CUDA graph in its default, "global" mode: locking would spoil the recording.
        """
        if self._thread is None and not self._refused:
            self._thread = threading.Thread(target=self._lock, args=(size, device), name="page locking", daemon=True)
            self._thread.start()

    def rewind(self) -> None:
        """Wait until the region is there, and mark all of it as free: the earlier tensors are no longer needed."""
        if self._thread is not None:
            self._thread.join()
        self._used = 0

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a new contiguous CPU tensor like `tensor`, in ordinary memory if the region has no room."""
        start, end = self._used, self._used + room(tensor)
        if self._region is None or not tensor.nbytes or end > len(self._region):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._used = end
        flat = torch.frombuffer(self._region, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return flat.view(tensor.shape)

    def close(self) -> None:
        """Give the region back. A later `reserve` makes another."""
        self.rewind()
        if self._unlock is not None:
            self._unlock()
        self._thread = self._region = self._unlock = None

    def _lock(self, size: int, device: torch.device) -> None:
        # A separate thread also because CUDA keeps an error for the thread's next launch, and this one has none.
        try:
            region = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(region, dtype=torch.uint8)
            # Allocates the pages, so that the driver has less to do: other threads' calls may wait for the driver.
            memory[:: mmap.PAGESIZE].zero_()
            register(memory, device)
        except Exception as error:
            self._refused = True
            reason = str(error).partition("\n")[0]
            log.warning("checkpoints are copied through ordinary memory, which is slower: %s", reason)
        else:
            self._unlock = weakref.finalize(self, unregister, memory)  # it keeps the memory until then
            self._unlock.atexit = False  # the process's end unlocks it too
            self._region = region


def register(memory: Tensor, device: torch.device) -> None:
    """Lock the pages of a CPU tensor for CUDA, in the context of the GPU `device`. Raises RuntimeError."""
    with torch.cuda.device(device):  # a new thread is on the first GPU, where this process may have no context
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unregister(memory: Tensor) -> None:
    """Undo `register`. A GPU that has failed refuses, which changes nothing: its process ends."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


_SLACK_BYTES = 1 << 20  # for what is on a GPU and was not counted: scales, counters


class Snapshots:
    """Takes snapshots, one after the other. Each overwrites the GPU's tensors in the one before it.

    After `prepare` 1.5 GB (GPT-2 124M and AdamW) take well under 0.1 s. Otherwise a copy is many times slower.
    """

    def __init__(self) -> None:
        self._pinned = Pinned()

    def prepare(self, value: Any) -> None:
        """Begin to lock as much memory as snapshots of `value` take, as `Pinned.reserve` does; returns at once."""
        tensors = list({tree.memory_key(local(tensor)): tensor for tensor in _gpu_tensors(value)}.values())
        if tensors:
            self._pinned.reserve(sum(map(room, tensors)) + _SLACK_BYTES, tensors[0].device)

    def begin(self) -> None:
        """Begin a snapshot: the one before it is no longer needed."""
        self._pinned.rewind()

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory, for a snapshot that has begun. It is there once that is taken."""
        if not tensor.is_cuda:
            return tensor.detach().clone()
        return self._pinned.empty_like(tensor).copy_(tensor.detach(), non_blocking=True)

    def take(self, value: Any, has_begun: bool = False) -> Any:
        """Return a copy of `value` that shares nothing with it. Its tensors are detached, contiguous and on the CPU.

        A tensor that occurs twice is copied once, and occurs twice in the copy. The host waits for each GPU once. What
        a checkpoint cannot keep is refused by the later write. `has_begun`: tensors on the CPU are those of `copy`.
        """
        copies: dict[tuple, Tensor] = {}
        devices: set[torch.device] = set()
        if not has_begun:
            self.begin()
        elif torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))

        def copy_tensor(tensor: Tensor) -> Tensor:
            key = tree.memory_key(tensor)
            if not tensor.numel() or key not in copies:
                source = tensor.detach().resolve_conj().resolve_neg()
                if source.is_cuda:
                    devices.add(source.device)
                    copies[key] = self._pinned.empty_like(source).copy_(source, non_blocking=True)
                else:
                    copies[key] = source.to("cpu", copy=not has_begun, memory_format=torch.contiguous_format)
            return copies[key]

        copied = _copy(value, copy_tensor)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def close(self) -> None:
        """Release the page-locked memory. Snapshots that are still held stay valid."""
        self._pinned.close()


def _copy(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, _copy(entry, copy_tensor)) for key, entry in value.items())
    if kind in (list, tuple):
        return kind(_copy(entry, copy_tensor) for entry in value)
    if kind in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
        return copy_tensor(value)
    return copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)


def _gpu_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _gpu_tensors(entry)
    elif isinstance(value, Tensor) and value.is_cuda and value.layout == torch.strided:
        yield value
