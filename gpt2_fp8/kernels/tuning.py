"""Which of cuBLASLt's algorithms computes a GEMM: the fastest one with the same bits as cuBLASLt's first choice.

cuBLASLt ranks its algorithms by a model of the GPU. For GPT-2's sizes the best one is often not the first: in many
forward GEMMs on an H200 it is 3 to 25 % faster. Most algorithms differ only in their tiles and sum in the same order,
so their results are equal to the last bit. An algorithm with another result is rejected. A run's numbers so do not
depend on the choice.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LAUNCHES = 5  # timed launches of each algorithm
GAIN = 0.99  # an algorithm must be at least 1 % faster
WORTH_MULTIPLICATIONS = 2**34  # smaller GEMMs have little to gain
SLICE_ELEMENTS = 2**24  # compared at a time

Launch = Callable[[Any, Tensor], int]  # runs an algorithm into an output; returns cuBLASLt's status


def fastest(algorithms: Sequence[Any], launch: Launch, out: Tensor, spare: Tensor) -> Any:
    """Return the algorithm to use; the first of `algorithms` is cuBLASLt's choice. Waits for the device.

    `launch(algorithm, out)` multiplies operands that do not change. `out` and `spare` are scratch memory of the same
    shape.
    """
    seconds = [_seconds(algorithm, launch, out) for algorithm in algorithms]
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    candidates = [i for i in order if seconds[i] < GAIN * seconds[0]]
    if not candidates:
        return algorithms[0]
    want = _result(algorithms[0], launch, spare)
    for i in candidates:
        if _equal(_result(algorithms[i], launch, out), want):
            return algorithms[i]
    return algorithms[0]


def _seconds(algorithm: Any, launch: Launch, out: Tensor) -> float:
    """Return the median time of several launches; infinity for an algorithm that refuses."""
    if launch(algorithm, out):
        return float("inf")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(LAUNCHES + 1)]
    marks[0].record()
    for mark in marks[1:]:
        launch(algorithm, out)
        mark.record()
    marks[-1].synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))


def _result(algorithm: Any, launch: Launch, out: Tensor) -> Tensor:
    out.fill_(1.0)  # what an accumulating GEMM starts from
    launch(algorithm, out)
    return out


def _equal(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors have the same bits. It compares slices, since a comparison needs memory too."""
    pairs = zip(got.view(-1).split(SLICE_ELEMENTS), want.view(-1).split(SLICE_ELEMENTS), strict=True)
    return all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in pairs)


def operand(like: Tensor) -> Tensor:
    """Draw normal numbers of a tensor's shape and dtype from an own generator: the global one belongs to the run."""
    generator = torch.Generator(like.device).manual_seed(like.numel())
    made = torch.empty_like(like)
    for part in made.view(-1).split(SLICE_ELEMENTS):
        part.copy_(torch.randn(part.shape, device=like.device, generator=generator))
    return made
