"""How the end of a sweep's job is seen on a cluster that keeps no accounts: the job is no longer in the queue.

submitit asks `sacct`. Without accounts that answers nothing, so submitit would wait for ever for a job that was
killed: it leaves no result.
"""

from __future__ import annotations

import subprocess
import time

_SECONDS = 60.0  # the longest that a command may take
_LOOK_SECONDS = 10.0  # between two looks at the queue
_OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


class QueueWatcher:
    """Knows the states of jobs from `squeue`. It has what submitit's jobs call of an `InfoWatcher`."""

    def __init__(self) -> None:
        self._mine: set[str] = set()
        self._states: dict[str, str] = {}
        self._looked_at = float("-inf")

    def register_job(self, job_id: str) -> None:
        """Note a job that is asked for from now on."""
        self._mine.add(job_id)

    def update_if_long_enough(self, mode: str) -> None:
        """Look at the queue, except with mode `cache`, or if that was seconds ago and `mode` is not `force`."""
        if mode == "force" or (mode == "standard" and time.monotonic() > self._looked_at + _LOOK_SECONDS):
            self.update()

    def update(self) -> None:
        """Look at the queue. What it does not show is over; if it cannot be seen, nothing is known anew."""
        self._looked_at = time.monotonic()
        asked = sorted(self._mine)
        try:
            listed = _output("squeue", "--noheader", "--array", "--me", "--states=all", "--format=%i %T")
        except (OSError, subprocess.SubprocessError):
            return
        found = dict(line.split(maxsplit=1) for line in listed.splitlines() if line.strip())
        self._states.update({job: found.get(job, _OVER[0]) for job in asked})

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job is over. `mode`: as `update_if_long_enough` has it."""
        return self.get_state(job_id, mode) in _OVER

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state of a job, as SLURM calls it."""
        new = job_id not in self._mine
        self.register_job(job_id)
        self.update_if_long_enough("force" if new and mode == "standard" else mode)
        return self._states.get(job_id, "UNKNOWN")


def watch() -> str | None:
    """Have submitit look at the queue, if SLURM keeps no accounts. Returns what to say of it, or None."""
    try:
        _output("sacct", "--noheader", "--allocations", "--jobs=1")
        return None
    except (OSError, subprocess.SubprocessError) as error:
        from submitit import SlurmJob

        SlurmJob.watcher = QueueWatcher()  # type: ignore[assignment]
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"sacct: {said[-1] if said else error}; so the ends of jobs are seen by squeue"


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return done.stdout
