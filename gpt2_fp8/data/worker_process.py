"""What runs in a worker process: read the units that come through a pipe, answer with their tokens, and show life.

Life is work. A thread reports every second in which the process has used CPU time, or waits before another attempt. A
process that is stopped, or stuck in a read that never ends, reports nothing. Waiting for a network counts as life: the
network's clients give up and try again well within `worker_pool.LIFE_SECONDS`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data.documents import TokenisedUnit
from gpt2_fp8.data.reader import Reader, WorkCounts
from gpt2_fp8.data.retry import is_waiting
from gpt2_fp8.data.units import DocumentCounts, Unit
from gpt2_fp8.runtime import registry

READY, ALIVE = "ready", "alive"  # what a worker sends in addition to its answers
BEAT_SECONDS = 1.0
_WORK_SECONDS = 0.001  # of CPU time in a beat that count as life; an idle interpreter uses less


class Done(NamedTuple):
    """A unit was read; its tokens are in the file `name`.

    Through the pipe they could block the parent: a process may be stopped in the middle of writing megabytes.
    """

    name: str
    documents: DocumentCounts
    sha256: str  # of the tokens
    replaced: float
    work: WorkCounts


class Failed(NamedTuple):
    """A unit could not be read."""

    error: Exception
    where: str  # the traceback


class SpoolLost(RunError):
    """The temporary folder had no room for the tokens of a unit. Its text could be read."""


def run(connection: Connection, reader: bytes, spool: str) -> None:
    """Read units until the pipe closes. `reader`: a pickled Reader; `spool`: the folder for tokens."""
    # These signals go to the whole process group. Only the parent ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    lock = threading.Lock()
    threading.Thread(target=_show_life, args=(connection, lock, spool), daemon=True).start()
    try:
        read: Reader = pickle.loads(reader)
        registry.load(read.plugins, Path.cwd())
        _send(connection, lock, READY)
        while True:
            unit = connection.recv()
            _send(connection, lock, _answer(read, unit, spool))
    except (EOFError, OSError):  # the parent has ended, or has closed its end
        _end(spool)


def _answer(read: Reader, unit: Unit, spool: str) -> Done | Failed:
    try:
        tokenised, work = read(unit)
        return Done(_kept(tokenised, spool), tokenised.counts, tokenised.sha256, tokenised.replaced, work)
    except Exception as error:
        where = traceback.format_exc()
        error.__cause__ = error.__context__ = None
        try:
            return Failed(pickle.loads(pickle.dumps(error)), where)
        except Exception:  # unpickling calls the exception with its message, which not every class accepts
            return Failed(RuntimeError(f"{type(error).__name__}: {error}"), where)


def _kept(tokenised: TokenisedUnit, spool: str) -> str:
    """Write the tokens into a file of the spool and return its path. Raises SpoolLost, and then leaves no file."""
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=spool, suffix=".npz")
        with os.fdopen(handle, "wb") as file:
            np.savez(file, tokens=tokenised.tokens, ends=tokenised.ends)
        return name
    except OSError as error:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)
        raise SpoolLost(f"{spool}: {error.strerror or error}") from None


def _send(connection: Connection, lock: threading.Lock, message: object) -> None:
    with lock:
        connection.send(message)


def _show_life(connection: Connection, lock: threading.Lock, spool: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    last = 0.0
    while not wait([parent.sentinel], timeout=BEAT_SECONDS):
        used = time.process_time() - time.thread_time()  # without this thread's part
        if used - last > _WORK_SECONDS or is_waiting():
            last = used
            try:
                _send(connection, lock, ALIVE)
            except OSError:
                break
    _end(spool)


def _end(spool: str) -> None:
    """Remove the spool and end: the parent may have been killed, and cannot do it."""
    shutil.rmtree(spool, ignore_errors=True)
    os._exit(1)
