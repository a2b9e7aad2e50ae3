"""What the processes of a run tell each other once a step. Plain torch; nothing where there is only one.

Numbers of the host (did memory run out, was there a signal) go from host to host, through gloo: the GPU, which has work
queued for a long while, is not asked. Tensors go from GPU to GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch import Tensor, distributed

from gpt2_fp8.compat.torch_private import divide_all

# Not a watch: a rank that is gone is known within a minute (`callbacks/rank_watchdog.py`). It has to be longer than
# what a rank may do alone while the others wait: compile, read data from a source that does not answer, save. As long
# as the wait for gradients may last, which Lightning sets to half an hour.
GROUP_TIMEOUT = timedelta(minutes=30)

_entered = 0


def entered() -> int:
    """How many exchanges within steps this process has entered: the same on ranks that stand at the same place."""
    return _entered


def enter() -> None:
    """Count an exchange that this process is about to enter. Every rank does so at the same places of a step."""
    global _entered
    _entered += 1


def is_distributed() -> bool:
    """Whether this process is one of several that train together."""
    return rank_and_world()[1] > 1


def rank_and_world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) outside of torch.distributed."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank, told to all of them: see `largest`. Asked within steps."""
    if is_distributed():
        enter()
    return bool(largest(int(flag)))


def largest(value: int) -> int:
    """The largest of all ranks' values, told to all of them. To be called on all of them at once; the host waits for
    the other hosts, and for no GPU."""
    if not is_distributed():
        return value
    told = torch.tensor(value, device="cpu")  # said, because Lightning sets a default device at times
    distributed.all_reduce(told, op=distributed.ReduceOp.MAX, group=_Hosts.group())
    return int(told)


def everyones(value: str) -> list[str]:
    """All ranks' values, by rank, told to all of them. To be called on all of them at once; no GPU is waited for."""
    if not is_distributed():
        return [value]
    told = [""] * rank_and_world()[1]
    distributed.all_gather_object(told, value, group=_Hosts.group())
    return told


class _Hosts:
    """The process group of the hosts, made at the first use, once for a default group.

    Making it is collective. It needs no place of its own for that: ranks do everything that is collective in one order,
    so the first call of `largest` on one rank meets the first call on every other. In a run that is the question for a
    signal at the start of `fit`, and where signals are not handled the one after the first step's gradients. A rank
    that leaves a wait for data because of a signal asks too, where the others ask before their step.

    torch keeps groups until they are destroyed, all at once. Here they are only looked at: whoever holds the last
    reference to a group of gloo when the interpreter ends waits for its threads, and they for the interpreter.
    """

    _default: weakref.ref[distributed.ProcessGroup] | None = None
    _made: weakref.ref[distributed.ProcessGroup] | None = None

    @classmethod
    def group(cls) -> distributed.ProcessGroup:
        default = distributed.group.WORLD
        assert default is not None
        if distributed.get_backend() == "gloo":
            return default
        made = cls._made() if cls._made and cls._default and cls._default() is default else None
        if made is None:
            made = distributed.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
            cls._default, cls._made = weakref.ref(default), weakref.ref(made)
        return made


def average(parameters: Iterable[Tensor]) -> None:
    """Replace every parameter's gradient by its mean over the ranks. To be called on all of them at once.

    After the backward and not within it, as DistributedDataParallel would: a rank whose backward fails (out of memory)
    can then begin again without leaving the others in the midst of an exchange, and the gradients need not go through
    autograd. What that costs is the overlap with the last micro-batch's backward.
    """
    if not is_distributed():
        return
    enter()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    works = [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]
    for work in works:
        work.wait()
    divide_all(gradients, distributed.get_world_size())


def maximum(values: Tensor) -> None:
    """Replace every element by the largest of all ranks. A contiguous tensor, of the same shape on every rank and
    without NaN, which has no order. To be called on all of them at once."""
    if is_distributed():
        distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
