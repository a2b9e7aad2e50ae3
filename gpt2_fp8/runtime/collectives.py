"""Collective operations between a run's processes, once a step. They do nothing for a single process.

Numbers of the host (did memory run out, was there a signal) go from host to host through gloo, and do not wait for the
GPU. Tensors go from GPU to GPU.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")
GROUP_TIMEOUT = timedelta(minutes=10)  # longer than one rank may compile, save, or read while the others wait

# Variables of torch's flight recorder, the older name of each, which torch still reads, and a value.
_RECORDER = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "{folder}/nccl_"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "", "1"),
)


def record_flights(folder: Path) -> None:
    """Have NCCL write its last collectives to nccl_RANK in `folder` when a rank hangs, for `torchfrtrace` to read.

    Call it before the group is formed. What the user has set stays.
    """
    for name, older, value in _RECORDER:
        if older not in os.environ:
            os.environ.setdefault(name, value.format(folder=folder.absolute()))


def is_distributed() -> bool:
    """Return whether this process is one of several that train together."""
    return rank_and_world()[1] > 1


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) outside torch.distributed."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank. Collective: see `largest`."""
    return bool(largest(int(flag)))


def largest(value: int) -> int:
    """All-reduce (MAX) one int over gloo. Collective. It blocks the host, never the GPU."""
    if not is_distributed():
        return value
    shared = torch.tensor(value, device="cpu")  # named, because Lightning sometimes sets a default device
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX, group=_host_group())
    return int(shared)


def everyones(value: T) -> list[T]:
    """Gather all ranks' values, in the order of ranks, over gloo. Collective. It blocks the host, never the GPU."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * rank_and_world()[1]
    distributed.all_gather_object(values, value, group=_host_group())
    return values


# The gloo group beside each default group. There are only weak references: the last reference to a gloo group must not
# live until the interpreter ends, which would wait for the group's threads, and they for it.
_host_groups: weakref.WeakKeyDictionary[distributed.ProcessGroup, weakref.ref[distributed.ProcessGroup]]
_host_groups = weakref.WeakKeyDictionary()


def _host_group() -> distributed.ProcessGroup:
    """Return the gloo group of the hosts; create it if the default group is new. Collective then.

    Ranks call everything collective in the same order, so the first call on one rank meets the first call on every
    other. A rank that leaves a wait for data because of a signal asks too, where the others ask before their step.
    """
    default = distributed.group.WORLD
    assert default is not None
    if distributed.get_backend() == "gloo":
        return default
    known = _host_groups.get(default)
    group = None if known is None else known()
    if group is None:
        # of a rank that hangs NCCL's watchdog, which has the recorder, is to tell first
        group = distributed.new_group(backend="gloo", timeout=GROUP_TIMEOUT + timedelta(minutes=1))
        _host_groups[default] = weakref.ref(group)
    return group


def maximum(values: Tensor) -> None:
    """Replace every element by the largest of all ranks. Collective. `values` is contiguous and contains no NaN."""
    if is_distributed():
        distributed.all_reduce(values, op=distributed.ReduceOp.MAX)


def divided(items: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `compute(items)`, of which each rank computes a part and gets the others' bits. Collective.

    items: contiguous [number, ...], the same on all ranks. `compute` treats them one by one, keeping shape and dtype.
    """
    rank, world = rank_and_world()
    if world == 1:
        return compute(items)
    each = -(-len(items) // world)
    gathered = items.new_empty(each * world, *items.shape[1:])
    own = slice(rank * each, min((rank + 1) * each, len(items)))
    if len(items[own]):
        gathered[own] = compute(items[own])
    distributed.all_gather_into_tensor(gathered, gathered[rank * each : (rank + 1) * each])
    return gathered[: len(items)]
