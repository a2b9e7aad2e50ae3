"""The process behind `tests.forkserver`: it imports what a run imports, and forks for each request.

A request is a line of JSON on standard input, and so is its answer on standard output. The forked process becomes
`python WORDS`: a session of its own, its folder, environment, streams, `__main__`, and the exit code of an interpreter.
`gpt2_fp8.run` itself is not imported here, since the program that is run must be new to its process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOADED = (
    *("gpt2_fp8.train.fit", "gpt2_fp8.layers.block", "hydra._internal.hydra", "pyarrow.parquet", "tiktoken"),
    "torch.utils.tensorboard",
)


def serve() -> None:
    """Answer requests until there are no more."""
    for name in PRELOADED:
        importlib.import_module(name)
    from gpt2_fp8 import compose

    compose.preflight(["trainer=cpu"])  # so that Hydra has found its plugins
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _become(request)
        print(json.dumps(_wait(child, request["seconds"], request["mib"])), flush=True)


def _wait(child: int, seconds: float, mib: int) -> dict[str, Any]:
    """Wait for the child; kill its process group where it takes too long, or too much memory."""
    start, killed = time.monotonic(), ""
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if not killed and time.monotonic() - start > seconds:
            killed = f"it was at work for more than {seconds} s"
        if not killed and _memory(child) > mib:
            killed = f"it took more than {mib} MiB of memory"
        if killed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    code, took = os.waitstatus_to_exitcode(status), time.monotonic() - start
    return {"returncode": code, "seconds": took, "mib": used.ru_maxrss >> 10, "killed": killed}


def _memory(child: int) -> int:
    try:
        return int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    except (OSError, IndexError):
        return 0


def _become(request: dict[str, Any]) -> None:
    """Be the program that is asked for, to its end."""
    code = 70
    try:
        _take_place(request)
        try:
            _run(request["words"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        faulthandler.cancel_dump_traceback_later()
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _take_place(request: dict[str, Any]) -> None:
    """Take the folder, the environment and the streams of the request, and forget what was drawn before the fork."""
    import numpy as np

    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(os.open(request[name], os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = open(0)  # noqa: SIM115
    tempfile.tempdir = None  # TMPDIR may be another
    np.random.seed()  # torch's generator has the same seed in every new process, Python's is drawn again by `fork`
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(request["seconds"] - 1, 1))  # where it hangs


def _run(words: list[str]) -> None:
    """Run `python WORDS`, with `__main__`, `sys.argv` and `sys.path` as the interpreter sets them."""
    first, *rest = words
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        path = os.path.abspath(first)
        sys.path.insert(0, os.path.dirname(path))
        sys.argv = words
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    serve()
