"""torch.compile, with worker processes that survive a signal to the whole process group."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gpt2_fp8.compat import torch_private
from gpt2_fp8.fp8.base import LossOf

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], options: dict[str, Any] | None = None) -> Callable[P, R]:
    """Compile `function` with `torch.compile`. `options`: Inductor's, by their names in its configuration."""
    if torch.cuda.is_available():
        start_workers()
    return torch.compile(function, options=options) if options else torch.compile(function)


def recorded(loss_of: LossOf) -> LossOf:
    """Compile a loss as `compiled` does, with its forward and backward as CUDA graphs, which Inductor records.

    A graph's results lie in memory that its next replay writes over. So what leaves here is a new tensor: the loss
    times `scale`. That also keeps `scale` out of the graphs. Gradients that a backward returns lie there too. They must
    be added to a `.grad` that is there already (`prepared`): autograd would keep the first as they are.
    """
    replayed = compiled(loss_of, {"triton.cudagraphs": True})

    def loss(ids: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return replayed(ids, is_first_microbatch, 1.0) * scale

    return loss


def prepared(parameters: Iterable[Tensor]) -> None:
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
