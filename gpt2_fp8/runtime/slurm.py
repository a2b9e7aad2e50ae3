"""What SLURM asks of a job that it is about to end: to save, and to be put back into the queue once.

`sbatch --signal=SIGUSR1@90` has it send SIGUSR1 to every task 90 seconds before the time limit (submitit asks for
SIGUSR2). A job that is preempted gets SIGTERM at the start of its grace time, and is not put back by SLURM if it ends
within that time. Without grace time, SLURM puts it back itself. The handlers of `runtime/signals.py` replace those of
Lightning and submitit, so nothing else requeues the job.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence

from gpt2_fp8.config.errors import Stopped
from gpt2_fp8.runtime.ranks import is_batch_job, is_first_rank, turns_before

log = logging.getLogger(__name__)

REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_SCONTROL_SECONDS = 60.0  # the longest that `scontrol` may take

_has_trained = False  # whether this process has trained a step
_left_the_queue = False  # whether this process requeues nothing


class Requeued(Stopped):
    """Stopped, and in the queue again: nothing is wrong, so the exit code is 0. The run's end knows what is saved."""

    def __init__(self, signum: int, job: str):
        super().__init__(signum)
        self.exit_code, self.lead = 0, ": "
        self.args = (f"stopped by signal {signum}; SLURM job {job} is in the queue again",)


class LeftToRankZero(Stopped):
    """Stopped, in a process of another rank. Rank 0 tells SLURM, so this exit code must end no other task."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.exit_code, self.lead = 0, None
        self.args = (f"stopped by signal {signum}; rank 0 says how it goes on",)


def is_submitted_call() -> bool:
    """Return whether submitit has started this process for a call that it has stored, as for a job of a sweep."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def lasting_name(words: Sequence[str]) -> str | None:
    """Return a name for a run of `words` that has none, the same whenever SLURM starts this batch job again.

    None outside of a batch script, and in what submitit calls, which is a job of a sweep with a name.
    """
    if os.environ.get("ENVIRONMENT") != "BATCH" or not job_id() or is_submitted_call() or any(map(os.isatty, range(3))):
        return None
    told = sorted(word for word in words if not word.startswith("run_name="))
    return f"slurm-{job_id()}-{hashlib.sha256(repr(told).encode()).hexdigest()[:6]}"


def note_step() -> None:
    """Note that this process has trained a step, or that it is not known whether it has."""
    global _has_trained
    _has_trained = True


def leave_the_queue() -> None:
    """Requeue nothing from now on: this process is a job of a parallel sweep, which requeues when all have saved."""
    global _left_the_queue
    _left_the_queue = True


def requeue_or_stop(signum: int) -> Stopped:
    """Return how a run ends that stopped for `signum`. In a batch job, rank 0 requeues it first if SLURM asks for that.

    A job that was started again and comes to its time limit before a step is not requeued: that would never end. Call
    it once, when everything is saved.
    """
    if not is_batch_job() or _left_the_queue or signum not in (*REQUEUE_SIGNALS, signal.SIGTERM):
        return Stopped(signum)
    if not is_first_rank():
        return LeftToRankZero(signum)
    job = job_id()
    if signum in REQUEUE_SIGNALS and turns_before() and not _has_trained:
        log.warning("SLURM job %s is at its limit again before a step was trained, and is not requeued", job)
        return Stopped(signum)
    asked = signum in REQUEUE_SIGNALS or is_preempted(job)
    return Requeued(signum, job) if asked and _requeue(job) else Stopped(signum)


def is_preempted(job: str) -> bool:
    """Return whether SLURM says that a job is in the grace time of its preemption. Raises nothing."""
    try:
        said = _scontrol("show", "job", "--oneliner", job)
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    found = dict(word.split("=", 1) for word in said.split() if "=" in word)
    preempted = found.get("PreemptTime", "None") not in ("None", "N/A", "Unknown")
    return preempted and found.get("JobState") in ("RUNNING", "SIGNALING")


def job_id() -> str:
    """Return the name of this job for `scontrol`; in an array, the name of this task."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID", "")
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}" if array else job


def _requeue(job: str) -> bool:
    """Ask SLURM once to requeue the job; return whether that worked. Raises nothing."""
    try:
        _scontrol("requeue", job)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip()
        log.warning("SLURM job %s could not be requeued: %s %s", job, error, said)
        return False
    log.info("SLURM job %s is requeued", job)
    return True


def _scontrol(*words: str) -> str:
    """Call `scontrol`; return what it prints."""
    done = subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True, timeout=_SCONTROL_SECONDS)
    return done.stdout
