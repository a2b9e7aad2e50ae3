"""One GPU for each of several test processes."""

from __future__ import annotations


def of_worker(worker: str, visible: str | None, count: int) -> str | None:
    """Return what xdist's process `worker` sets CUDA_VISIBLE_DEVICES to, of `count` GPUs; None: nothing."""
    listed = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    number = worker.removeprefix("gw")
    return listed[int(number) % len(listed)] if number.isdecimal() and count else None
