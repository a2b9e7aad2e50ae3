"""One GPU for each of several test processes."""

from __future__ import annotations


def of_worker(worker: str, visible: str | None, count: int) -> str | None:
    """Return what a process of pytest-xdist sets CUDA_VISIBLE_DEVICES to; None: nothing.

    worker: xdist's name of it, `gw0` and so on, or "" outside of it. visible: CUDA_VISIBLE_DEVICES, None if it has no
    value. count: GPUs that torch finds.
    """
    listed = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    number = worker.removeprefix("gw")
    return listed[int(number) % len(listed)] if number.isdecimal() and count else None
