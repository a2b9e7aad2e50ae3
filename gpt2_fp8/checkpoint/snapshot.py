"""A copy of a run's state in host memory. It is written later, while training changes the original."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.checkpoint.pinned import Pinned, room

_SLACK_BYTES = 1 << 20  # for what is on a GPU and was not counted: scales, counters


class Snapshots:
    """Takes snapshots, one after the other. Each overwrites the GPU's tensors in the one before it.

    If `prepare` was called before, these are copied into page-locked memory: 1.5 GB (GPT-2 124M with both moments of
    AdamW) in well under 0.1 s. Otherwise the copy is in ordinary memory, and many times slower.
    """

    def __init__(self) -> None:
        self._pinned = Pinned()

    def prepare(self, value: Any) -> None:
        """Begin to lock as much memory as snapshots of the size of `value` take; returns at once.

        Nothing happens for a value without tensors on a GPU. Do not call it while a CUDA graph is being recorded.
        """
        tensors = list({_place(tensor): tensor for tensor in _gpu_tensors(value)}.values())
        if tensors:
            self._pinned.reserve(sum(map(room, tensors)) + _SLACK_BYTES, tensors[0].device)

    def take(self, value: Any) -> Any:
        """Return a copy of `value` that shares nothing with it. Its tensors are detached, contiguous and on the CPU.

        `value` is what `tree.flatten` takes. A tensor that occurs twice is copied once, and occurs twice in the copy.
        The copy is complete when this returns; the host waits for each GPU once. It does not refuse values that a
        checkpoint cannot keep: the later write does.
        """
        self._pinned.rewind()
        snapshot = _Snapshot(self._pinned)
        copied = snapshot.copy(value)
        for device in snapshot.devices:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def close(self) -> None:
        """Release the page-locked memory. Snapshots that are still held stay valid."""
        self._pinned.close()


class _Snapshot:
    def __init__(self, pinned: Pinned) -> None:
        self.devices: set[torch.device] = set()
        self._pinned = pinned
        self._copies: dict[tuple, Tensor] = {}

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
        place = _place(tensor)
        if tensor.numel() and place in self._copies:
            return self._copies[place]
        source = tensor.detach().resolve_conj().resolve_neg()
        if source.is_cuda:
            self.devices.add(source.device)
            host = self._pinned.empty_like(source).copy_(source, non_blocking=True)
        else:
            host = source.cpu() if source.device.type != "cpu" else source.clone(memory_format=torch.contiguous_format)
        self._copies[place] = host
        return host


def _place(tensor: Tensor) -> tuple:
    """Return a key for a tensor's memory and how it is read, as in `tree`."""
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), bits)


def _gpu_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _gpu_tensors(entry)
    elif isinstance(value, Tensor) and value.is_cuda and value.layout == torch.strided:
        yield value
