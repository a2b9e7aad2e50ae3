"""torch.compile, whose worker processes a signal to the whole process group does not take along."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from gpt2_fp8.compat import torch_private

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compile(function)`."""
    if torch.cuda.is_available():
        start_workers()
    return torch.compile(function)


def start_workers() -> None:
    """Start the processes that compile Triton kernels with SIGTERM and SIGUSR1 blocked, which they inherit.

    A scheduler sends SIGTERM to every process of a job, `timeout` to its process group. Inductor's workers would end,
    and the compilation that waits for them never does (torch 2.11 to 2.13), while this process is to finish its step
    and save. They end with this process, when their pipe to it closes. A signal that arrives meanwhile is delivered
    afterwards.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        torch_private.start_compile_workers()
    except Exception as error:  # no public interface: of another torch, whose first compilation starts its workers
        log.debug("Inductor's workers were not started ahead: %s", error)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
