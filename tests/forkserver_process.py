"""The process behind `tests.forkserver`: it imports what a run imports, and becomes `python WORDS` for each request."""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import importlib
import importlib.metadata
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import termios
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

from gpt2_fp8 import compose
from tests import forkserver, once

PRELOADED = (
    *("gpt2_fp8.train.fit", "gpt2_fp8.layers.block", "hydra._internal.hydra", "pyarrow.parquet", "tiktoken"),
    *("torch.utils.tensorboard", "filelock", "gpt2_fp8.train.launch", "hydra._internal.logging_config"),
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    with mock.patch.object(importlib.metadata, "version", _version):
        for name in PRELOADED:
            importlib.import_module(name)
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    once.remember()
    compose.preflight(["trainer=cpu"])  # so that Hydra has found its plugins
    for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes its libraries down one by one
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # torch's reads sources
    assert "huggingface_hub" not in sys.modules, "it reads its variables when it is imported"
    gc.collect()
    gc.freeze()  # a collection in a forked process passes over all of it
    connection.send(b"ready")
    serve(connection)


def _version(name: str, known: Callable[[str], str] = importlib.metadata.version) -> str:
    """Hide transformers, which torchmetrics would import, and with it huggingface_hub."""
    if name == "transformers":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)


def serve(connection: socket.socket) -> None:
    while True:
        message, streams, *_ = socket.recv_fds(connection, forkserver.MOST, 3)
        if not message:
            return
        child = _fork_for_another(json.loads(message), connection, streams)
        for stream in streams:
            os.close(stream)
        connection.send(str(child).encode())


def _fork_for_another(request: dict[str, Any], connection: socket.socket, streams: list[int]) -> int:
    """Fork a process that loses its parent at once, so that the one that asks, who adopts orphans, becomes it."""
    read, write = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        child = os.fork()
        if child:
            os.write(write, str(child).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        for end in (read, write):
            os.close(end)
        _become(request, connection, streams)
    os.waitpid(between, 0)
    os.close(write)
    child = int(os.read(read, 64))
    os.close(read)
    return child


def _become(request: dict[str, Any], connection: socket.socket, streams: list[int]) -> NoReturn:
    code = 70
    try:
        connection.close()
        _take_place(request, streams)
        try:
            _run(request["words"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException as error:
            sys.excepthook(*sys.exc_info())
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        faulthandler.cancel_dump_traceback_later()
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code & 0xFF)


def _take_place(request: dict[str, Any], streams: list[int]) -> None:
    """Take the place, environment and streams of the request, and forget what was drawn before the fork."""
    import numpy as np
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    if request["session"]:
        os.setsid()
    else:
        os.setpgid(0, request["group"])
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    if request["session"] and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C there is for this session
    sys.stdin = open(0)  # noqa: SIM115
    tempfile.tempdir = None  # TMPDIR may be another
    rank_zero_only.rank = _get_rank() or 0  # type: ignore[attr-defined]  # read when Lightning is imported
    if request["ranks"]:
        _serve_ranks()
    np.random.seed()  # torch's generator has the same seed in every new process, Python's is drawn again by `fork`
    if request["seconds"]:
        faulthandler.enable()
        faulthandler.dump_traceback_later(request["seconds"])  # where it hangs


def _serve_ranks() -> None:
    """Leave a process as this one is now, to be forked when the program starts its ranks. It ends with the program."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        here.close()
        for number in _SIGNALS:  # they are the program's, and so is what it prints
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        serve(there)
        os._exit(0)
    there.close()
    forkserver.fork_ranks(here)


def _run(words: list[str]) -> None:
    """Run `python WORDS`, with `__main__`, `sys.argv` and `sys.path` as the interpreter sets them."""
    first, *rest = words
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = paths
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
    main()
