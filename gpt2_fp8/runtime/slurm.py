"""What SLURM asks of a job that it is about to end: to be put back into the queue.

`sbatch --signal=SIGUSR1@90 --requeue` has SLURM send SIGUSR1 to every task 90 seconds before the time limit. Lightning
2.6 has a handler for it, which saves in the middle of any computation; ours replaces it (`runtime/signals.py`).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess

from gpt2_fp8.config.errors import Stopped

log = logging.getLogger(__name__)

REQUEUE_SIGNAL = signal.SIGUSR1
_SCONTROL_SECONDS = 60.0  # the longest that `scontrol` may take


class Requeued(Stopped):
    """Stopped, saved, and in the queue again: nothing is wrong, so the exit code is 0."""

    def __init__(self, signum: int, job: str):
        super().__init__(signum)
        self.exit_code, self.lead = 0, None
        self.args = (
            f"stopped by signal {signum}; SLURM job {job} is in the queue again and continues by ckpt_path=last",
        )


def is_batch_job() -> bool:
    """Return whether `srun` started this process in a batch job, by the rule of Lightning's SLURMEnvironment.

    A shell on a node (`srun --pty bash`) is not a batch job: what is started there is treated as anywhere else.
    """
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def ended(signum: int) -> Stopped:
    """Return how a run ends that stopped for `signum`. Under SLURM, rank 0 requeues the job first for SIGUSR1.

    Call it once, when everything is saved.
    """
    if signum != REQUEUE_SIGNAL or not is_batch_job():
        return Stopped(signum)
    job = job_id()
    if os.environ.get("SLURM_PROCID", "0") != "0" or _requeue(job):
        return Requeued(signum, job)
    return Stopped(signum)


def job_id() -> str:
    """Return the name of this job for `scontrol`; in an array, the name of this task."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID", "")
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}" if array else job


def _requeue(job: str) -> bool:
    """Ask SLURM once to requeue the job; return whether that worked. Raises nothing."""
    try:
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
            raise ValueError(f"{job!r} is not the number of a job")
        subprocess.run(
            ["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=_SCONTROL_SECONDS
        )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip()
        log.warning("SLURM job %s could not be requeued: %s %s", job, error, said)
        return False
    log.info("SLURM job %s is requeued", job)
    return True
