"""How much of the host's memory this process may still take: the machine's, its container's, and its own limits.

A limit that the system does not report counts as none. Standard library only.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")  # where the system's own files are
# the shell's limits, and the commands that set them
SHELL = {resource.RLIMIT_AS: "ulimit -v", resource.RLIMIT_DATA: "ulimit -d"}
_UNLIMITED_BYTES = 1 << 60  # control groups of version 1 report a huge number instead of no limit
_UNUSED_ADDRESS_BYTES = 1 << 30  # reserved addresses that are never used: threads' stacks and arenas


class Limit(NamedTuple):
    """A limit of memory, in bytes: `whole` in all, of which `left` are still available."""

    left: int
    whole: int
    what: str


def narrowest() -> Limit | None:
    """Return the limit that leaves the least memory; None if none is known."""
    return min(_limits(), default=None)


def machine_bytes() -> int | None:
    """Return all memory in bytes that this process could ever have, of machine or container; None if unknown."""
    return min((limit.whole for limit in _limits()), default=None)


def _limits() -> Iterator[Limit]:
    known = _meminfo()
    if whole := _physical():
        yield Limit(min(known.get("MemAvailable", whole), whole), whole, "this machine")
    yield from _control_groups()
    pages = _numbers(ROOT / "proc/self/statm")
    size = _page_bytes() or 0
    for (kind, what), used, slack in zip(SHELL.items(), (0, 5), (_UNUSED_ADDRESS_BYTES, 0), strict=True):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            taken = pages[used] * size if len(pages) > used else 0
            yield Limit(max(most - taken - slack, 0), most, what)


def _physical() -> int | None:
    pages, size = _told("SC_PHYS_PAGES"), _page_bytes()
    return pages * size if pages and size else None


def _page_bytes() -> int | None:
    return _told("SC_PAGE_SIZE")


def _told(name: str) -> int | None:
    """Return a number that the system reports under `name`; None if it does not."""
    try:
        number = os.sysconf(name)
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _control_groups() -> Iterator[Limit]:
    """Yield the limits of every control group that this process is in, up to the root, in both versions.

    In a container the path is the host's. Only the files at the root exist there, and those are the container's.
    """
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "-", "")
        if controllers == "":
            top, most, used, cached = ROOT / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top = ROOT / "sys/fs/cgroup/memory"
            most, used, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (top / group, *(top / parent for parent in group.parents)):
            limit = _numbers(folder / most)  # the word "max" means no limit
            if limit and limit[0] < _UNLIMITED_BYTES:
                taken = (_numbers(folder / used) or [0])[0] - _table(folder / "memory.stat").get(cached, 0)
                yield Limit(max(limit[0] - max(taken, 0), 0), limit[0], "this control group (a container)")


def _meminfo() -> dict[str, int]:
    return {name.rstrip(":"): 1024 * size for name, size in _table(ROOT / "proc/meminfo").items()}


def _table(path: Path) -> dict[str, int]:
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _numbers(path: Path) -> list[int]:
    return [int(word) for word in _text(path).split() if word.isdigit()]


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text()
    return ""
