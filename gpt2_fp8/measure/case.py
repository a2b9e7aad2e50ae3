"""One measurement: full training steps of one configuration, in a child process that leaves nothing behind.

A child is `python -m MODULE ANSWER`, with its request as JSON on stdin. It writes its answer, also JSON, to the path
ANSWER. It leads its own session, so it can be killed with its children: when it ends, takes too long, or is
interrupted. If the parent itself is killed, the child notices that its parent has changed and kills its session.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import one_line
from gpt2_fp8.runtime import registry

Status = Literal["ok", "out of memory", "refused", "failed", "timed out"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to measure: whole optimizer steps, on tokens of the configuration's data set that are on the device."""

    config: RunConfig
    steps: int  # timed
    warmup: int  # steps before them: compilation, calibration, settling of the GPU's clock
    profile: bool = False  # whether one more step runs under torch's profiler


WAITS = "(between kernels)"  # the name of the line for the time in which a GPU ran none


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One line of a profile."""

    name: str
    milliseconds: float  # in one step
    share: float  # part of the step's time on the device, 0 to 1
    calls: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one case. A field is None if the case ended before it was measured."""

    status: Status
    message: str | None = None  # why, in one line, unless the status is "ok"
    remedy: str | None = None  # what the user can do about it, if that is known
    device: str | None = None
    ran: str | None = None  # the precision that ran: fp32, bf16, fp8_hybrid, fp8_e4m3
    reason: str | None = None  # why it is not what was asked for, if so
    backend: str | None = None
    layers: str | None = None  # the backend's word for what it is made of
    compiled: bool | None = None
    attention: str | None = None  # the kernel of attention, in the backend's words
    tokens_per_second: float | None = None  # the median of the timed steps
    slowest: float | None = None  # tokens per second of the slowest and of the fastest timed step
    fastest: float | None = None
    mfu_bf16: float | None = None
    peak_memory_gb: float | None = None  # GiB allocated; None on a CPU
    losses: list[float] = field(default_factory=list)  # of every step, with warm-up
    grad_norms: list[float] = field(default_factory=list)
    profile: list[Kernel] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def measure(case: Case, timeout_s: float, log: Path | None = None) -> Result:
    """Run a case in a child process, so that a crash or a hang is only a row. `log`: a file for its output."""
    ended = run_child("gpt2_fp8.measure.worker", asdict(case), timeout_s, log)
    if ended.status != "ok":
        return Result(status=ended.status, message=ended.message)
    kernels = [Kernel(**kernel) for kernel in ended.answer.pop("profile")]
    return Result(**ended.answer, profile=kernels)


# ---- a child process ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended: its answer, and why there is none, or why it is not complete."""

    status: Literal["ok", "failed", "timed out"]
    answer: Any = None  # what it wrote; None unless the status is "ok"
    message: str | None = None


def run_child(module: str, request: object, timeout_s: float, log: Path | None = None) -> Ended:
    """Run `module` on a request of plain JSON values. In any case the child and its children are gone at the end."""
    try:
        with tempfile.TemporaryDirectory(prefix="gpt2_fp8-") as name:
            folder = Path(name)
            (folder / "request").write_text(json.dumps(request))
            with (log or folder / "log").open("w+", errors="replace") as output:
                return _run(module, folder, timeout_s, output)
    except OSError as error:  # a full disk, or no folder for the log
        return Ended(status="failed", message=one_line(f"could not be run: {error}"))


def _run(module: str, folder: Path, timeout_s: float, output: IO[str]) -> Ended:
    command = [sys.executable, "-X", "faulthandler", "-m", __name__, str(os.getpid())]
    command += [module, str(folder / "answer")]
    places = [str(Path(__file__).parents[2]), *registry.folders(), *filter(None, [os.environ.get("PYTHONPATH")])]
    # a checkout need not be installed, and the child can import the modules that were imported as plugins
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    with (folder / "request").open() as stdin:
        child = subprocess.Popen(
            command, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(timeout_s)
    finally:
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for processes that have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    late = f"took longer than {timeout_s:g} seconds" if code is None else None
    with suppress(OSError, ValueError):  # it wrote nothing, or not all
        return Ended(status="ok", answer=json.loads((folder / "answer").read_text()), message=late)
    if code is None:
        return Ended(status="timed out", message=late)
    return Ended(status="failed", message=_reason(code, output))


def _reason(code: int, output: IO[str]) -> str:
    """Return why a child ended without an answer: its signal, or else its last line of output."""
    if code < 0:
        about = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{about}"
    output.seek(0)
    lines = [line for line in output.read().splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else f"ended with exit code {code} and without a word"


def _die_with(parent: int) -> None:
    """End this process and its children once the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _parent, _module, _answer = sys.argv[1:]
    threading.Thread(target=_die_with, args=[int(_parent)], daemon=True).start()
    sys.argv = [_module, _answer]
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
