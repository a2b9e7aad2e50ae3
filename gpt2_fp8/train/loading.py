"""The import of torch and the training program. If something ends it, the run's summary says so."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import memory_limits, registry, signals, slurm
from gpt2_fp8.train import summary

LEAST_DATA_BYTES = 128 << 20  # with a smaller limit, a library that torch loads ends the process


def training(config: RunConfig, folder: Path, here: Path) -> Callable[[RunConfig, Path, bool], float | None]:
    """Import and return `fit.run`, for a run of `config` in `folder`, and import its plugins.

    `here`: the folder where plugins are searched for. Raises UserError if the process may not have the memory for
    torch, or if a plugin cannot be imported, and Stopped for a signal.
    """
    with signals.handled() as handlers:
        try:
            run = _imported()
            registry.load(config.plugins, here)
            return run
        except BaseException as caught:
            handlers.hold()  # only the end follows
            if handlers.received is not None:  # the import may have turned the signal's error into another one
                stopped = slurm.ended(handlers.received)
                summary.write_unbegun(config, folder, stopped)
                raise stopped from None
            summary.write_unbegun(config, folder, caught)
            raise


def _imported() -> Callable[[RunConfig, Path, bool], float | None]:
    try:
        if 0 <= resource.getrlimit(resource.RLIMIT_DATA)[0] < LEAST_DATA_BYTES:
            raise MemoryError("it takes more")
        from gpt2_fp8.train.fit import run
    except (ImportError, MemoryError, OSError) as error:
        for kind, what in memory_limits.SHELL.items():
            if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
                raise UserError.of(
                    f"torch cannot be loaded into the {limit >> 20:,} MiB that `{what}` leaves: {_reason(error)}",
                    f"type `{what} unlimited` before the command; a limit of a container's memory does no harm",
                ) from error
        raise
    return run


def _reason(error: BaseException) -> str:
    """Return the first cause of an error in one line. numpy's message is a page of advice, which is of no use here."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
