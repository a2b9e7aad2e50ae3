"""How much of the host's memory this process may still take: the machine's, its container's, and its own limits.

Everything that the system does not tell is taken for no limit. Standard library only.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")  # of the system's own files
SHELL = {resource.RLIMIT_AS: "ulimit -v", resource.RLIMIT_DATA: "ulimit -d"}  # limits of it, and what sets them
_UNLIMITED = 1 << 60  # version 1 of control groups has a huge number for none
_ADDRESSES = 1 << 30  # that are reserved and never used: threads' stacks and arenas


class Limit(NamedTuple):
    """A bound, in bytes: of it at most `whole`, of which `left` is to be had now."""

    left: int
    whole: int
    what: str

    @property
    def lift(self) -> str | None:
        """What the user can type against it; None where only memory helps."""
        return f"type `{self.what} unlimited` before the command" if self.what in SHELL.values() else None


def narrowest() -> Limit | None:
    """The limit that leaves the least; None where none is known."""
    return min(_limits(), default=None)


def machine_bytes() -> int | None:
    """All of the memory that this process could ever have: of the machine, or of its container."""
    return min((limit.whole for limit in _limits()), default=None)


def swap_bytes() -> int:
    """What the machine could still put elsewhere."""
    return _meminfo().get("SwapFree", 0)


def _limits() -> Iterator[Limit]:
    known = _meminfo()
    if whole := _physical():
        yield Limit(min(known.get("MemAvailable", whole), whole), whole, "this machine")
    yield from _control_groups()
    pages = _numbers(ROOT / "proc/self/statm")
    size = _page_bytes() or 0
    for (kind, what), used, slack in zip(SHELL.items(), (0, 5), (_ADDRESSES, 0), strict=True):
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
    """What the system tells of itself under `name`, if it does."""
    try:
        number = os.sysconf(name)
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _control_groups() -> Iterator[Limit]:
    """Of both versions: every group that this process is in, up to the root. In a container the path is the host's, and
    only the root's files, which are the container's, are there."""
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
            limit = _numbers(folder / most)  # the word "max" where there is none
            if limit and limit[0] < _UNLIMITED:
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
