"""A micro-batch's forward and backward as CUDA graphs: recorded once, then launched as a whole.

A small micro-batch is over sooner on the GPU than the host can launch its thousand kernels. Recorded, they are one
launch. That needs every kernel, address and scalar to stay the same, which holds for the fused layers: their scales are
tensors, and their gradients are written where the parameters' gradients lie.

Two graphs, since the first micro-batch of a step does more: it updates the scales, casts the weights, and writes the
gradients that the others add to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor, nn

from gpt2_fp8.precision import state

WARM_UP = 2  # passes before recording: kernels are compiled and chosen, workspaces allocated


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Where a device's micro-batches are recorded: one stream, since the products keep a workspace for each."""
    return torch.cuda.Stream(device)


class GraphedGradients:
    """The gradients of one micro-batch, by replay. Recorded at the first call, on that call's shapes and `scale`.

    `loss_of(ids, is_first_microbatch, scale)` is as in `step.accumulate`. Recording leaves scales, histories and the
    random number generators as they were: cuDNN's attention draws numbers even where nothing is dropped, and a run that
    is continued records once more than one that is not. The memory of the graphs is their own: it is not shared with
    what runs beside them (validation).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[Tensor, bool | None, float], Tensor],
        context: Callable[[], AbstractContextManager],
    ):
        self.model, self.loss_of, self.context = model, loss_of, context
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._losses: dict[bool, Tensor] = {}
        self._gradients: list[Tensor | None] = []

    def __call__(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Gradients of the mean loss over a step's micro-batches, of equal shapes [sequences, tokens + 1], into
        `.grad`; returns that loss, float32 on the device."""
        if not self._graphs:
            self._record(parts[0], 1 / len(parts))
            self._count = len(parts)
        assert len(parts) == self._count, "the share of a micro-batch in its step is part of the graphs"
        assert all(part.shape == self._ids.shape for part in parts), "so is its shape"
        for parameter, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        total = torch.zeros((), device=parts[0].device)
        for i, part in enumerate(parts):
            self._ids.copy_(part)
            self._graphs[i == 0].replay()
            total += self._losses[i == 0]
        return total

    def _record(self, ids: Tensor, scale: float) -> None:
        self._ids = ids.clone()
        device = torch.cuda.current_device()
        stream = _stream(device)
        with state.restored(self.model), torch.random.fork_rng(devices=[device]):
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UP):
                        for first in (True, False):
                            self._pass(first, scale)
                        self._discard()
            finally:  # where memory runs out, scales are put back and memory is freed from the other stream
                torch.cuda.synchronize()
            pool = torch.cuda.graph_pool_handle()
            graphs = {}
            for first in (True, False):
                graphs[first] = torch.cuda.CUDAGraph()
                # Another thread may be locking memory for checkpoints, which would end a global capture.
                with torch.cuda.graph(graphs[first], pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._losses[first] = self._pass(first, scale)
            self._graphs = graphs
            self._gradients = [parameter.grad for parameter in self.model.parameters()]
        self._discard()

    def _pass(self, first: bool, scale: float) -> Tensor:
        with self.context():
            loss = self.loss_of(self._ids, first, scale)
        loss.backward()
        return loss.detach()

    def _discard(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
