"""What the ranks of a run exchange of a step's gradients. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, distributed

from gpt2_fp8.compat.torch_private import copy_all, divide_all
from gpt2_fp8.runtime import collectives

# Of float32 gradients in a collective: larger ones are faster (two H200s, 0.5 GB: one 1.7 ms, eight 2.0, one for each
# tensor 6.9). Memory holds one bucket more than the gradients; beside CUDA graphs, or in another dtype, all buckets.
BUCKET_BYTES = 1 << 30
ALIGNMENT = 64  # elements; a gradient in a bucket is as aligned as one of its own, so that the same kernels take it

NoSync = Callable[[], AbstractContextManager]


class Exchange:
    """Owns the gradients of a step, in the parameters' `.grad`, from the first micro-batch to their norm.

    Ranks exchange gradients after the last backward, not within it as DistributedDataParallel does. A rank whose
    backward fails (out of memory) can then begin again without leaving the others in the middle of a collective. And
    gradients need not go through autograd. The price is that communication does not overlap with that backward.

    Args:
        parameters: the model's; float32.
        no_sync: the context in which a wrapper of the model leaves its gradients alone, as Lightning's DDP does.
        dtype: what the gradients are rounded to on their way, and summed in.

    Attributes:
        place: see `out_of_memory.Fitting`.
    """

    place: Callable[[], object] | None = None

    def __init__(self, parameters: Iterable[Tensor], no_sync: NoSync = nullcontext, dtype: torch.dtype = torch.float32):
        self.parameters = list(parameters)
        self.no_sync = no_sync
        self.dtype = dtype

    def part(self, last: bool) -> AbstractContextManager:
        """Enter one micro-batch of a step, its forward and its backward."""
        return nullcontext()

    def end(self) -> None:
        """Replace every gradient by its mean over the ranks, all of which have theirs. Collective.

        Gradients are copied into buckets, and ranks reduce one while the next is filled. Those in float32 stay there:
        `.grad` becomes a view.
        """
        if collectives.is_distributed():
            for bucket in [self._send(parameters) for parameters in self._buckets()]:
                self._receive(*bucket)

    def copies(self) -> list[Tensor]:
        """Allocate as much memory as `end` needs where it does not free that of the gradients."""
        own = self.parameters if collectives.is_distributed() else []
        return [torch.empty_like(parameter, dtype=self.dtype) for parameter in own]

    def give_up(self) -> None:
        """Free the gradients of a step that failed, or whose update is not made."""
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`. Returns the norm before, float32."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm, foreach=True)

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Yield the parameters that have gradients, in their order, in groups of at most BUCKET_BYTES or one."""
        bucket: list[Tensor] = []
        size = 0
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if bucket and size + parameter.grad.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.grad.nbytes
        if bucket:
            yield bucket

    def _send(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor], distributed.Work]:
        """Copy gradients into a bucket and have the ranks reduce it. Returns `parameters`, its views and the work."""
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=parameters[0].device)
        parts = zip(flat.split(sizes), parameters, strict=True)
        views = [part[: parameter.numel()].view_as(parameter) for part, parameter in parts]
        copy_all(views, _gradients(parameters))
        if self.dtype == torch.float32:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        return parameters, views, distributed.all_reduce(flat, _mean(), async_op=True)

    def _receive(self, parameters: list[Tensor], views: list[Tensor], work: distributed.Work) -> None:
        """Wait for a bucket; put means into `.grad`."""
        work.wait()
        gradients = _gradients(parameters)
        if self.dtype != torch.float32:
            copy_all(gradients, views)
        if _mean() == distributed.ReduceOp.SUM:
            divide_all(gradients, distributed.get_world_size())


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _mean() -> distributed.ReduceOp.RedOpType:
    """Return what reduces to a mean; gloo has only sums."""
    return distributed.ReduceOp.AVG if distributed.get_backend() == "nccl" else distributed.ReduceOp.SUM
