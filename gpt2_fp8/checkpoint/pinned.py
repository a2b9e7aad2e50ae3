"""Host memory that a GPU writes to at the full speed of its bus: page-locked by a thread, ahead of need.

Locking pages takes several times as long as the copies that it makes fast, so it is done while nothing waits for it.
The memory is mapped and registered here. Torch's own allocator (`pin_memory=True`) rounds up to a power of two: 1.5 GB
to 2 GiB, and 18.7 GB to 32. It returns nothing while the process lives, which may train a sweep's next run.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 256  # a multiple of every dtype's size, and a good alignment for copies


def room(tensor: Tensor) -> int:
    """Return the bytes that `Pinned.empty_like` takes for `tensor`."""
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Pinned:
    """Tensors in one region of page-locked memory, handed out one after the other.

    If no pages can be locked, one warning says so, and the tensors are in ordinary memory. `close`, or the end of this
    object, unlocks the region. Its memory lives as long as the tensors in it.
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
        """Return a contiguous CPU tensor of the shape and dtype of `tensor`, with a storage of its own.

        Its content is arbitrary. It is in ordinary memory if there is no region, or no room in it.
        """
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
