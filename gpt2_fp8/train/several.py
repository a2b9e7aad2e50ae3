"""Jobs of several processes that no launcher has started: this process starts them. Torch is imported in functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import JobError, Stopped
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks, signals
from gpt2_fp8.train import summary


def processes(config: RunConfig) -> int:
    """Return how many processes a job takes that are still to be started; 1: this one runs it.

    Raises UserError if there are fewer GPUs.
    """
    options = config.trainer
    if ranks.current().launcher or options.devices == 1 or (options.devices, options.accelerator) == ("auto", "cpu"):
        return 1
    from gpt2_fp8.runtime import devices

    return devices.devices(config, devices.device(config))


def launch(count: int, words: Sequence[str]) -> int:
    """Run a command line as `count` processes; returns the exit code."""
    with signals.handled():
        from gpt2_fp8.runtime.launch import launch

    return launch(count, words)


def job(count: int, words: Sequence[str], folder: Path) -> float | None:
    """Run a job of a sweep, whose processes compose its command line; returns its last validation loss.

    Raises JobError or Stopped if it ends otherwise.
    """
    code = launch(count, words)
    if code > 128:
        raise Stopped(code - 128)
    if not (folder / summary.NAME).is_file():
        raise JobError("failed", code, f"ended with exit code {code}, and without a summary")
    found = disk.read_json(folder / summary.NAME)
    if code:
        raise JobError(found.get("status", "failed"), code, found.get("message") or f"ended with exit code {code}")
    return found.get("last_val_loss")
