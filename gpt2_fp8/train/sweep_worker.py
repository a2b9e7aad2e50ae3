"""A worker of a parallel sweep: it starts each job in a process of its own, on a place of its own, and waits for it.

So a job that is killed, or whose GPU fails, takes neither the worker nor another job with it. The GPU's memory is free
when a job has ended, and CUDA is new to the next one. The worker itself never imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2_fp8.config.amounts import duration
from gpt2_fp8.config.errors import JobError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import registry, slurm, sweep_room
from gpt2_fp8.runtime.slots import Slot
from gpt2_fp8.runtime.spool import Spool
from gpt2_fp8.runtime.sweep_room import Room
from gpt2_fp8.train import summary

log = logging.getLogger(__name__)

CHILD = "gpt2_fp8.train.sweep_job"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as its worker knows it.

    Attributes:
        number: its place in the sweep.
        config: its settings.
        folder: where it writes.
        here: the folder where plugins are searched for.
        words: its overrides.
        logging: what `logging.config.dictConfig` takes, without what writes to the terminal.
        output: where the rest of its output goes.
    """

    number: int
    config: RunConfig
    folder: Path
    here: Path
    words: Sequence[str]
    logging: dict[str, Any]
    output: Path


def run(job: Job, room: Room) -> float | None:
    """Run a job when a place is free, and return its last validation loss. Raises JobError if it ends otherwise."""
    try:
        slot = _wait_for_slot(job, room)
        name = room.plan.gpus.get(slot.name, slot.name)
        words = " ".join(word for word in job.words if word not in room.plan.shared)
        log.info("job %d on %s: %s; its log: %s", job.number, name, words, os.path.relpath(job.output))
        began = time.monotonic()
        answer = _ended(job, room, slot)
    except JobError as error:
        if error.status != "stopped" or not (job.folder / summary.NAME).exists():  # it may be there from before
            summary.write_unbegun(job.config, job.folder, error, job.words)
        log.error("job %d %s: %s", job.number, error.status, error)
        raise
    finally:
        if room.is_orphan():  # nobody waits for what this returns
            os._exit(1)
    took = duration(time.monotonic() - began)
    if (failed := answer.get("error")) is not None:
        said = str(failed["message"])
        log.error("job %d %s after %s: %s", job.number, failed["status"], took, said.partition("\n")[0])
        raise JobError(failed["status"], failed["exit_code"], said)
    loss = answer["val_loss"]
    log.info("job %d completed in %s%s", job.number, took, "" if loss is None else f": validation {loss:.4f}")
    return loss


def _wait_for_slot(job: Job, room: Room) -> Slot:
    """Return a place, as soon as there is one. Raises JobError if jobs are to end before that."""
    waiting = False
    while True:
        if (signum := room.stopped_by()) is not None:
            raise JobError("stopped", 128 + signum, f"stopped by signal {signum} before it began")
        try:
            if (slot := room.slot(job.config.trainer.accelerator == "cpu")) is not None:
                return slot
        except OSError as error:
            raise JobError("failed", 1, f"its GPU cannot be locked: {error}") from error
        if not waiting:
            log.info("job %d waits: another sweep has every GPU that is left", job.number)
        waiting = True
        time.sleep(sweep_room.LOOK_SECONDS)


def _ended(job: Job, room: Room, slot: Slot) -> dict[str, Any]:
    """Run the job's process to its end, and return its answer. Raises JobError if it leaves none."""
    with Spool() as spool:
        answer = spool / "answer"
        request = {
            "config": asdict(job.config), "folder": str(job.folder), "here": str(job.here), "words": list(job.words),
            "logging": job.logging, "slot": slot.descriptor, "answer": str(answer),
        }  # fmt: skip
        try:
            (spool / "request").write_text(json.dumps(request))
            with (spool / "request").open() as stdin, job.output.open("a") as output:
                child = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", CHILD],
                    stdin=stdin, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    pass_fds=[slot.descriptor], env=_environment(room, slot),
                )  # fmt: skip
        except OSError as error:
            raise JobError("failed", 1, f"its process cannot be started: {error}") from error
        finally:
            os.close(slot.descriptor)  # its process holds the place now
        code = _wait(child, room)
        with suppress(OSError, ValueError):
            return dict(json.loads(answer.read_text()))
    raise JobError("failed", 1, _reason(code, job.output))


def _wait(child: subprocess.Popen[bytes], room: Room) -> int:
    """Wait for the process, pass on a request to stop, and leave none of its children. Returns its exit code."""
    told = False
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(sweep_room.LOOK_SECONDS)
            if not told and (signum := room.stopped_by()) is not None:
                child.send_signal(signum)
                told = True
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _environment(room: Room, slot: Slot) -> dict[str, str]:
    """Return the environment of a job: it sees its own GPU alone, or none."""
    gpu = slot.name if slot.name in room.plan.gpus else ""
    threads = os.environ.get("OMP_NUM_THREADS", str(room.plan.threads))
    places = [str(Path(__file__).parents[2]), *registry.folders(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": gpu,
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": os.pathsep.join(places),
        slurm.JOB_OF_SWEEP: "1",
    }
    environment.pop(sweep_room.VARIABLE)
    return environment


def _reason(code: int, output: Path) -> str:
    if code < 0:
        about = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{about}"
    return f"ended with exit code {code} and without a summary; what it said last is in {output}"
