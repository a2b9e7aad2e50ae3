"""A process of the same run by a name that means it alone, so that one which is frozen can be ended. Linux.

A launcher ends a frozen process late or never: SIGTERM waits until the process goes on, and torchrun's agent waits half
a minute before SIGKILL. The name keeps a stranger safe to whom the number was given meanwhile, or on another host.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """A process. `place`: where its number means it: a boot of a kernel, and a namespace of numbers."""

    place: str
    number: int
    began: str  # in clock ticks after the boot


def own() -> Peer | None:
    """Return this process; None where the system does not tell."""
    with suppress(OSError, IndexError):
        return Peer(_place(), os.getpid(), _began(os.getpid()))
    return None


def kill(peer: Peer) -> bool:
    """Send SIGKILL to a process if it is on this host and still the one that is meant; return whether it was sent."""
    with suppress(OSError, IndexError):
        if peer.place == _place() and peer.began == _began(peer.number):
            os.kill(peer.number, signal.SIGKILL)
            return True
    return False


def _place() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _began(number: int) -> str:
    """Return field 22 of /proc/NUMBER/stat; the second, a name in brackets, may have blanks. Source: proc(5)."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
