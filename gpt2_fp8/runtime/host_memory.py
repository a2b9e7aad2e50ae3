"""The peak memory of this process on the host: what it had resident, with all that it has loaded."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
_most = 0.0  # GiB; Linux counts in batches, so that a later reading can be a little lower


def peak_gb() -> float:
    """Return the most that was resident at once since `reset_peak`, or since the process began, in GiB.

    Linux's own counter is read where there is one: `ru_maxrss` includes what the parent had before this program began.
    """
    global _most
    _most = max(_most, _now())
    return _most


def _now() -> float:
    with suppress(OSError):
        if found := _PEAK.search(_STATUS.read_text(encoding="ascii", errors="replace")):
            return int(found[1]) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def reset_peak() -> None:
    """Forget the peak so far, so that a job of a sweep has its own. Only Linux can; elsewhere nothing happens."""
    global _most
    _most = 0.0
    with suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")
