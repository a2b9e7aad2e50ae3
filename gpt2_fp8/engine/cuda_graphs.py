"""How a micro-batch's forward and backward reach the GPU: under `torch.compile`, or as CUDA graphs.

The GPU finishes a small micro-batch sooner than the host can launch its thousand kernels. Recorded, they are one
launch. Every kernel, address and scalar must then stay the same. That is true for the fused layers: their scales are
tensors, and gradients are written where the parameters' gradients already are (`GraphedGradients`). Graphs of compiled
layers are Inductor's (`compile_with_graphs`).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gpt2_fp8.compat import torch_private
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.base import LossOf
from gpt2_fp8.model.loss import trained_loss

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

WARM_UP = 2  # passes before recording: they compile and choose kernels and allocate workspaces


def compile_function(function: Callable[P, R], options: dict[str, Any] | None = None) -> Callable[P, R]:
    """Compile `function` with `torch.compile`. `options`: Inductor's, by their names in its configuration."""
    if torch.cuda.is_available():
        start_workers()
    return torch.compile(function, options=options) if options else torch.compile(function)


def compile_with_graphs(loss_of: LossOf) -> LossOf:
    """Compile a loss as `compile_function` does, with its forward and backward as CUDA graphs, which Inductor records.

    A graph's results lie in memory that its next replay writes over. So what leaves here is a new tensor: the loss
    times `scale`. That also keeps `scale` out of the graphs. Gradients that a backward returns lie there too. They must
    be added to a `.grad` that is there already (`fill_gradients`): autograd would keep the first as they are.
    """
    replayed = compile_function(loss_of, {"triton.cudagraphs": True})

    def loss(ids: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return replayed(ids, is_first_microbatch, 1.0) * scale

    return loss


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Give every parameter without a gradient one of zeros, to which the graphs' gradients are added."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def start_workers() -> None:
    """Start the processes that compile Triton kernels, with SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 blocked.

    A scheduler sends SIGTERM to every process of a job; `timeout` sends it to the process group. Inductor's workers
    would end, and the compilation that waits for them would never end (torch 2.11 to 2.13). But this process must
    finish its step and save. The workers inherit the blocked signals and end with this process, when their pipe to it
    closes. A signal that arrives here meanwhile is delivered afterwards.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        torch_private.start_compile_workers()
    # not a public interface: in another torch version the first compilation starts the workers
    except Exception as error:
        log.debug("Inductor's workers were not started ahead: %s", error)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which a device's micro-batches are recorded.

    There is only one, since GEMMs keep a workspace for each stream.
    """
    return torch.cuda.Stream(device)


class GraphedGradients:
    """Computes gradients of one micro-batch by replay. The first call records, for its shapes and `scale`.

    There are two graphs, because the first micro-batch of a step does more. It updates the scales, quantizes the
    weights, and writes the gradients to which the others add.

    `loss_of(ids, is_first_microbatch, scale)` is as in `step.accumulate`. Recording leaves scales, histories and random
    number generators unchanged. It must: cuDNN's attention draws numbers even without dropout, and a resumed run
    records once more than an uninterrupted one. The graphs' memory is their own: validation does not share it.
    """

    def __init__(self, model: nn.Module, loss_of: LossOf, context: Callable[[], AbstractContextManager]):
        self.model, self.loss_of, self.context = model, loss_of, context
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._losses: dict[bool, Tensor] = {}
        self._gradients: list[Tensor | None] = []

    def __call__(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Compute the gradients of the mean loss over a step's micro-batches into `.grad`.

        `parts`: tensors of equal shapes [sequences, tokens + 1]. Returns the mean loss, float32 on the device.
        It is as `step.accumulate` returns it.
        """
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
            total = total + self._losses[i == 0]
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
                        self.model.zero_grad(set_to_none=True)
            finally:  # if memory runs out, scales are put back and memory is freed from the other stream
                torch.cuda.synchronize()
            pool = torch.cuda.graph_pool_handle()
            graphs = {}
            for first in (True, False):
                graphs[first] = torch.cuda.CUDAGraph()
                # Another thread may be pinning memory for checkpoints, which would end a global capture.
                with torch.cuda.graph(graphs[first], pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._losses[first] = self._pass(first, scale)
            self._graphs = graphs
            self._gradients = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)

    def _pass(self, first: bool, scale: float) -> Tensor:
        with self.context():
            loss = self.loss_of(self._ids, first, scale)
        trained_loss(loss).backward()
        return loss.detach()
