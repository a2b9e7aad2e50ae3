"""The import of torch and the training program. If something ends it, the run's summary says so."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config.own_words import Typed, going_on
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import registry, signals, slurm
from gpt2_fp8.train import summary

Train = Callable[[RunConfig, Path, Sequence[str], Typed | None], float | None]


def training(config: RunConfig, folder: Path, here: Path, words: Sequence[str] = (), in_sweep: bool = False) -> Train:
    """Import and return `fit.run`, for a run of `config` in `folder`, and import its plugins.

    `here`: the folder where plugins are searched for. `words`: the run's overrides, for the summary of one that ends
    here. `in_sweep`: it is a sweep's job. On return signals are held: `GracefulStop` releases them. Raises UserError if
    a plugin cannot be imported, and Stopped for a signal.
    """
    with signals.handled() as handlers:
        try:
            run = _imported()
            registry.load(config.plugins, here)
            handlers.hold()  # a signal waits for the run's own context, whose end writes the summary
            return run
        except BaseException as caught:
            handlers.hold()  # only the end follows
            if handlers.received is not None:  # the import may have turned the signal's error into another one
                stopped = slurm.ended(handlers.received)
                stopped.tell(going_on(folder, here, bool(pointers.steps(folder / "checkpoints")), in_sweep))
                summary.write_unbegun(config, folder, stopped, words)
                raise stopped from None
            summary.write_unbegun(config, folder, caught, words)
            raise


def rendezvous() -> ModuleType:
    """Import torch and return `runtime.rendezvous`, for the processes that a launcher has started to meet."""
    with signals.handled():
        _imported()
        from gpt2_fp8.runtime import rendezvous

        return rendezvous


def _imported() -> Train:
    # When a process is gone, torch warns of each connection to it by a page of its own stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with _collected_never():
        from gpt2_fp8.train.fit import run
    return run


@contextmanager
def _collected_never() -> Iterator[None]:
    """Leave what is imported for the first time out of garbage collections: modules live as long as the process.

    The import is then a quarter faster, and so is every later collection. It costs 7 MiB of garbage that stays.
    """
    if not gc.isenabled() or "gpt2_fp8.train.fit" in sys.modules:  # a later job of a sweep: garbage of the one before
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
