"""Child processes that leave nothing behind: a request goes in, an answer comes out, or one line that says why not.

A child is `python -m MODULE ANSWER`, with its request as JSON on stdin; it writes its answer, JSON too, to the path
ANSWER. It leads a session of its own, so that it can be killed with its own children: when it ends, takes too long, or
is interrupted. Where the parent is killed and cannot do so, the child sees that its parent has changed, and does.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from gpt2_fp8.runtime import registry
from gpt2_fp8.runtime.spool import Spool


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended. `answer` is what it wrote; None unless the status is "ok". `message`: why not, in one line; or
    why an answer that is there is not all of it."""

    status: Literal["ok", "failed", "timed out"]
    answer: Any = None
    message: str | None = None


def run(
    module: str,
    request: object,
    timeout_s: float,
    log: Path | None = None,
    stopped: Callable[[Any], object] | None = None,
) -> Ended:
    """Run `module` on a request of plain JSON values. `log`: where its output is kept, if that can be written.
    `stopped`: what gets the answer that the child has written by then, where a KeyboardInterrupt ends this.

    Raises KeyboardInterrupt, and nothing on account of the child, which is gone with its own children either way.
    """
    try:
        with Spool() as folder:
            (folder / "request").write_text(json.dumps(request))
            try:
                with _opened(log or folder / "log", folder / "log") as output:
                    return _run(module, folder, timeout_s, output)
            except KeyboardInterrupt:
                if stopped and (answer := _answered(folder)) is not None:
                    stopped(answer)
                raise
    except OSError as error:  # a full disk
        return Ended(status="failed", message=one_line(f"could not be run: {error}"))


def _run(module: str, folder: Path, timeout_s: float, output: IO[str]) -> Ended:
    command = [sys.executable, "-X", "faulthandler", "-m", __name__]
    command += [str(os.getpid()), module, str(folder / "answer")]
    with (folder / "request").open() as stdin:
        child = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        )
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(timeout_s)
    finally:
        _kill_group(child.pid)
        child.wait()
    late = f"took longer than {timeout_s:g} seconds" if code is None else None
    if (answer := _answered(folder)) is not None:
        return Ended(status="ok", answer=answer, message=late)
    if code is None:
        return Ended(status="timed out", message=late)
    return Ended(status="failed", message=_reason(code, output))


def _answered(folder: Path) -> Any:
    """What the child wrote; None where that is nothing, or not the whole of it."""
    try:
        return json.loads((folder / "answer").read_text())
    except (OSError, ValueError):
        return None


def _opened(log: Path, instead: Path) -> IO[str]:
    """A log to write and to read; another where the first cannot be written, as in a folder that somebody deleted."""
    with suppress(OSError):
        return log.open("w+", errors="replace")
    return instead.open("w+", errors="replace")


def _environment() -> dict[str, str]:
    """This process's, with this package found wherever the child runs: a checkout need not be installed. Likewise the
    modules that were imported as plugins."""
    places = [str(Path(__file__).parents[2]), *registry.folders(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def section(
    name: str,
    request: object,
    timeout_s: float,
    log: Path | None = None,
    stopped: Callable[[list[dict[str, Any]]], object] | None = None,
) -> list[dict[str, Any]]:
    """The rows of `python -m gpt2_fp8.measure.NAME`; where it does not come to an end, the last row says so. `stopped`:
    what gets the rows so far, where a KeyboardInterrupt ends this."""

    def stop(rows: list[dict[str, Any]]) -> None:
        assert stopped
        stopped(_cut_short(rows, "stopped", "stopped here: this row and those after it are missing"))

    ended = run(f"gpt2_fp8.measure.{name}", request, timeout_s, log, stopped and stop)
    if ended.status == "ok":
        return _cut_short(ended.answer, "timed out", ended.message) if ended.message else list(ended.answer)
    return [{"name": name, "status": ended.status, "message": ended.message}]


def _cut_short(rows: list[dict[str, Any]], status: str, message: str) -> list[dict[str, Any]]:
    """A section's rows so far. The last stands for the one under way, and is to say why it has no figures."""
    if rows and rows[-1].get("status") == "failed":
        rows[-1] |= {"status": status, "message": message}
    return rows


def one_line(error: object, limit: int = 200) -> str:
    """A text as one line that is not too long."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _reason(code: int, output: IO[str]) -> str:
    """Why a child ended without an answer: its signal, else the last line that it wrote."""
    if code < 0:
        about = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{about}"
    output.seek(0)
    lines = [line for line in output.read().splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else f"ended with exit code {code} and without a word"


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS answers the latter for processes that have ended
        os.killpg(leader, signal.SIGKILL)


def _die_with(parent: int) -> None:
    """End this process and its children once the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    _kill_group(os.getpgrp())


if __name__ == "__main__":
    _parent, _module, _answer = sys.argv[1:]
    threading.Thread(target=_die_with, args=[int(_parent)], daemon=True).start()
    sys.argv = [_module, _answer]
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
