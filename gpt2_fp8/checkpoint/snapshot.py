"""A run's state, copied to host memory: what is written later, while training changes the original."""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_Shape = tuple[torch.dtype, torch.Size]


class Snapshots:
    """Takes snapshots, one after the other, and keeps the page-locked buffers that tensors of a GPU are copied into.

    A page-locked (pinned) buffer is what a GPU can write to at the full speed of its bus: 1.5 GB (GPT-2 124M with both
    moments of AdamW) in well under 0.1 s. Locking pages takes longer than the copy, so the first snapshot is the slow
    one. The buffers of a snapshot are overwritten by the next: it has to be done with by then.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Shape, list[Tensor]] = {}

    def take(self, value: Any) -> Any:
        """A copy of `value` that shares nothing with it; its tensors are detached, contiguous and on the CPU.

        `value` is what `tree.flatten` takes. A tensor that is met twice is copied once, and found twice in the copy.
        The copy is complete when this returns; the host waits for each GPU once. Raises nothing of its own: a value
        that a checkpoint cannot keep is refused when it is written.
        """
        snapshot = _Snapshot(self._buffers)
        copied = snapshot.copy(value)
        for device in snapshot.devices:
            torch.cuda.current_stream(device).synchronize()
        return copied


class _Snapshot:
    def __init__(self, buffers: dict[_Shape, list[Tensor]]) -> None:
        self.devices: set[torch.device] = set()
        self._buffers = buffers
        self._used: Counter[_Shape] = Counter()
        self._copies: dict[tuple, Tensor] = {}  # where a tensor's memory is and how it is read, as in `tree`

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict):
            return kind((key, self.copy(entry)) for key, entry in value.items())
        if kind in (list, tuple):
            return kind(self.copy(entry) for entry in value)
        if kind in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
            return self._tensor(value)
        return copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        bits = (tensor.is_conj(), tensor.is_neg())
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), bits)
        if tensor.numel() and key in self._copies:
            return self._copies[key]
        source = tensor.detach().resolve_conj().resolve_neg()
        if source.is_cuda:
            self.devices.add(source.device)
            host = self._buffer(source).copy_(source, non_blocking=True)
        else:
            host = source.cpu() if source.device.type != "cpu" else source.clone(memory_format=torch.contiguous_format)
        self._copies[key] = host
        return host

    def _buffer(self, source: Tensor) -> Tensor:
        """The next buffer of the shape and dtype of `source`; a new one where this snapshot has used all there are."""
        shape = (source.dtype, source.shape)
        have = self._buffers.setdefault(shape, [])
        if self._used[shape] == len(have):
            have.append(_page_locked(source))
        self._used[shape] += 1
        return have[self._used[shape] - 1]


def _page_locked(like: Tensor) -> Tensor:
    """An empty host tensor; an ordinary one, which is copied into more slowly, where no more pages can be locked."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.warning("checkpoints are copied through ordinary memory, which is slower: %s", str(error).splitlines()[0])
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
