"""Ports for tests whose processes meet, chosen before one of them listens."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_choice = random.SystemRandom().choice  # a run seeds Python's generator, and every worker would choose the same


def free_port() -> int:
    """Return a port at which nobody listens, and which the system gives to nobody who asks for any."""
    low, high = map(int, _RANGE.read_text().split()) if _RANGE.exists() else (0, 0)
    every = range(10_000, 1 << 16)
    apart = [port for port in every if not low <= port <= high] or list(every)
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):  # somebody has it
            free.bind(("", port := _choice(apart)))
            return port
