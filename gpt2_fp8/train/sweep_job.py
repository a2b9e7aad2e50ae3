"""One job of a parallel sweep: `run` in joblib's worker, and the program of its own process, which trains.

So a job that is killed, or whose GPU fails, takes neither the worker nor another job with it, and CUDA is new to the
next one. The environment names the GPU before the process imports torch; the worker never does. The process is told by
its standard input what to train, as JSON. Its exit code and its `summary.json` tell the rest.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt2_fp8.config import parsing
from gpt2_fp8.config.errors import JobError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import gpu_locks, programs, signals, slurm
from gpt2_fp8.train import launch
from gpt2_fp8.train.run_end import RunEnd, end_of_process, known_end, say_end

log = logging.getLogger(__name__)
LOG = "run.log"  # in the job's folder
_LOOK_SECONDS = 0.2


def run(config: RunConfig, folder: Path, here: Path, words: list[str], stop: Path) -> float | None:
    """Run a job on a free GPU; return its last validation loss. Raises JobError if it does not complete.

    `stop`: the file that holds the number of a signal once jobs are to end for it.
    """
    for number in signals.SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the job would inherit
    parent, end = os.getppid(), RunEnd(config, folder, here, words)
    try:
        gpu, lock = _wait_for_gpu(config.trainer.accelerator == "cpu", stop, parent)
        with lock:
            log.info("on %s; its log: %s", f"GPU {gpu}" if gpu else "the CPU", os.path.relpath(folder / LOG))
            asked = {"config": asdict(config), "folder": str(folder), "here": str(here), "words": words}
            code = _run_process(json.dumps(asked | {"level": log.getEffectiveLevel()}), gpu, folder / LOG, stop, parent)
    except JobError as error:
        end.close(error)
        raise
    finally:
        if os.getppid() != parent:  # nobody waits for the result, and joblib has more jobs for this worker
            os._exit(1)
    try:
        return end_of_process(end, code)
    except JobError as error:
        log.error("%s: %s", error.status, str(error).partition("\n")[0])
        raise


def _stop_signal(stop: Path, parent: int) -> int | None:
    """Return the signal for which jobs are to end, SIGTERM if the sweep's first process is gone; None if none is."""
    with suppress(OSError, ValueError):
        return int(stop.read_text())
    return None if os.getppid() == parent else signal.SIGTERM


def _wait_for_gpu(on_cpu: bool, stop: Path, parent: int) -> tuple[str, Any]:
    """Return a GPU and its lock, as soon as one is free; "" for a job on the CPU."""
    while (signum := _stop_signal(stop, parent)) is None:
        if on_cpu or not gpu_locks.list_gpus():
            return "", nullcontext()
        if (taken := gpu_locks.lock_gpu()) is not None:
            return taken
        time.sleep(_LOOK_SECONDS)
    raise JobError("stopped", 128 + signum, f"stopped by signal {signum} before it began")


def _run_process(request: str, gpu: str, log_file: Path, stop: Path, parent: int) -> int:
    """Run the job's process to its end, pass on a request to stop, and leave none of its children."""
    places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-X", "faulthandler", "-m", __name__]
    with log_file.open("a") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, text=True, start_new_session=True, env=environment
        )
    told = False
    try:
        with suppress(BrokenPipeError), child.stdin as stdin:  # type: ignore[union-attr]
            stdin.write(request)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_LOOK_SECONDS)
            if not told and (signum := _stop_signal(stop, parent)) is not None:
                child.send_signal(signum)
                told = True
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> int:
    """Run the job that the standard input describes, and return the exit code."""
    programs.begin()
    asked = json.load(sys.stdin)
    slurm.leave_the_queue()
    with signals.handle_signals() as handlers:
        threading.Thread(target=_end_after, args=[os.getppid()], daemon=True).start()
        try:
            with handlers.at_once():
                form = "[%(asctime)s] %(message)s"
                logging.basicConfig(stream=sys.stdout, level=asked["level"], format=form, datefmt="%H:%M:%S")
                config, _ = parsing.build(RunConfig, asked["config"])
                assert config is not None
                launch.train(config, Path(asked["folder"]), Path(asked["here"]), asked["words"])
        except BaseException as caught:
            handlers.hold()
            return say_end(known_end(caught, handlers))
    return 0


def _end_after(worker: int) -> None:
    """Save and end if the worker is gone: nobody else knows of this process then."""
    while os.getppid() == worker:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
