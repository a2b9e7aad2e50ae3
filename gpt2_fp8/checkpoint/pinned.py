"""Host memory that a GPU writes to at the full speed of its bus: page-locked by a thread, ahead of need.

Locking pages takes several times as long as the copies that it makes fast, and is done where nobody waits for it. The
memory is mapped and registered here. Torch's own allocator (`pin_memory=True`) rounds up to a power of two, 1.5 GB to
2 GiB and 18.7 GB to 32, and gives nothing back while the process lives, which may have a sweep's next run to train.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ALIGNMENT = 256  # bytes: a multiple of every dtype's size, and of what copies like


def room(tensor: Tensor) -> int:
    """The bytes that `Pinned.empty_like` takes for `tensor`."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class Pinned:
    """Tensors in one region of page-locked memory, handed out one behind the other.

    Where no pages can be locked, one warning says so, and the tensors are in ordinary memory. `close`, or the end of
    this object, unlocks the region; its memory lives as long as tensors in it do.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._region: mmap.mmap | None = None
        self._unlock: weakref.finalize | None = None
        self._used = 0  # bytes
        self._refused = False

    def reserve(self, size: int, device: torch.device) -> None:
        """Begin to lock `size` bytes (at least one) for the GPU `device`; returns at once.

        Nothing happens where a region is there or in the making, or was refused before. Not to be called while another
        thread records a CUDA graph in its default, "global" mode: locking would spoil the recording.
        """
        if self._thread is None and not self._refused:
            self._thread = threading.Thread(target=self._lock, args=(size, device), name="page locking", daemon=True)
            self._thread.start()

    def rewind(self) -> None:
        """Wait until the region is there, and take all of it for free: the tensors handed out so far are done with."""
        if self._thread is not None:
            self._thread.join()
        self._used = 0

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A contiguous CPU tensor of the shape and dtype of `tensor`, of any content, with a storage of its own.

        It is in ordinary memory where there is no region, or no room in it.
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
        # In a thread of its own also because CUDA keeps an error for the thread's next launch: here there is none.
        try:
            region = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(region, dtype=torch.uint8)
            # Makes the pages: less is left to the driver, for which other threads' calls may have to wait.
            memory[:: mmap.PAGESIZE].zero_()
            register(memory, device)
        except Exception as error:
            self._refused = True
            reason = str(error).partition("\n")[0]
            log.warning("checkpoints are copied through ordinary memory, which is slower: %s", reason)
        else:
            self._unlock = weakref.finalize(self, unregister, memory)  # which keeps the memory until then
            self._unlock.atexit = False  # the process's end unlocks it too
            self._region = region


def register(memory: Tensor, device: torch.device) -> None:
    """Lock the pages of a CPU tensor for CUDA, in the context of the GPU `device`. Raises RuntimeError."""
    with torch.cuda.device(device):  # a thread begins with the first GPU, where this process may have no context
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unregister(memory: Tensor) -> None:
    """Undo `register`. A GPU that has failed refuses, which changes nothing: its process ends."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
