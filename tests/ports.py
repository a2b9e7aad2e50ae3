"""Ports for tests whose processes meet, chosen before one of them listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_choice = random.SystemRandom().choice  # a run seeds Python's generator, and every worker would choose the same


def free_port() -> int:
    """Return a port at which nobody listens. It is none that the system gives to whoever asks for any.

    Between the choice and the moment when it is used, other tests ask for dozens of those.
    """
    ports = apart()
    while True:
        port = _choice(ports)
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:  # somebody has it
                continue
            return port


def apart() -> list[int]:
    """Return the ports that are given to nobody; where the system gives out all of them, all."""
    given = set()
    if _RANGE.exists():
        low, high = map(int, _RANGE.read_text().split())
        given = set(range(low, high + 1))
    every = range(10_000, 1 << 16)
    return [port for port in every if port not in given] or list(every)
