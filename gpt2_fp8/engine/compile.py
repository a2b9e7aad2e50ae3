"""torch.compile, with worker processes that survive a signal to the whole process group."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from gpt2_fp8.compat import torch_private

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], options: dict[str, Any] | None = None) -> Callable[P, R]:
    """Compile `function` with `torch.compile`. `options`: Inductor's, by their names in its configuration."""
    if torch.cuda.is_available():
        start_workers()
    return torch.compile(function, options=options) if options else torch.compile(function)


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
