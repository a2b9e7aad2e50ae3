"""Python programs in processes that have imported torch, Lightning and Hydra: a second in place of six."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST = 1 << 17  # bytes of a request
# What a shell, a test runner, a scheduler or an earlier run in this process might have set, and no test asks for.
_NOT_OURS = (
    "PYTEST_", "HYDRA_", "SLURM_", "TORCHELASTIC", "WORLD_SIZE", "RANK", "LOCAL_RANK", "PL_", "_TORCHINDUCTOR",
    "PYTORCH_NVML", "GPT2_FP8_", "GROUP_", "ROLE_", "MASTER_", "ACCELERATE_", "OMPI_", "PMI_",
    "KMP_INIT_AT_FORK",  # of joblib, when it is imported
)  # fmt: skip
# A process has these from its start; they are the same for all.
_FIXED = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
          "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
_of_ranks: socket.socket | None = None  # in a forked run: to where its ranks come from
_lock = threading.Lock()
_SET_CHILD_SUBREAPER = 36  # prctl(2)


def _fork(streams: list[int], **request: Any) -> int:
    """Return the id of a new process whose standard streams are `streams`; it becomes a child of this one."""
    message = json.dumps(request | {"group": os.getpgrp()}, default=str).encode()
    connection = _of_ranks or _started()
    with _lock, _adopts_orphans():
        socket.send_fds(connection, [message], streams)
        answer = connection.recv(64)
    if not answer:
        raise RuntimeError("the fork server has ended; its own output says why")
    return int(answer)


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, *words]`, forked; with `ranks` so are those that the program starts."""

    def __init__(self, args: Any, *, ranks: bool = False, seconds: float | None = None, **options: Any) -> None:
        self._asked = {"ranks": ranks, "seconds": seconds}
        super().__init__(args, **options)

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        # `subprocess` has no public place for another way to start. All else of it works with any child.
        given = inspect.signature(super()._execute_child).bind(*arguments, **named).arguments  # type: ignore[misc]
        if not _is_python(given["args"]) or given["preexec_fn"] or given["shell"]:
            raise ValueError(f"{given['args']}: only a Python program can be forked")
        _, *words = given["args"]
        words = words[1:] if words[0] == "-u" else words  # as torchrun's agent starts its ranks
        environment = self._seen(os.environ if given["env"] is None else given["env"])
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        self.pid = _fork(
            [number if stream == -1 else stream for number, stream in enumerate(streams)],
            words=words, cwd=given["cwd"] or os.getcwd(), environment=environment,
            session=given["start_new_session"], **self._asked,
        )  # fmt: skip
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]

    def _seen(self, environment: Mapping[str, str]) -> dict[str, str]:
        given = environment.items() - os.environ.items()  # what a test asks for, whatever its name
        return ours(environment) | _FIXED | dict(given)


class PopenOfRanks(Popen):
    """What `subprocess.Popen` is in a forked run whose ranks are forked too. Another program is started as ever."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        start = super()._execute_child if _is_python(arguments[0]) else super(Popen, self)._execute_child  # type: ignore[misc]
        start(*arguments, **named)

    def _seen(self, environment: Mapping[str, str]) -> dict[str, str]:
        return dict(environment)


def _is_python(words: object) -> bool:
    return isinstance(words, (list, tuple)) and words[0] == sys.executable


def ours(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_NOT_OURS)}


@functools.cache
def _started() -> socket.socket:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = ours(os.environ) | _FIXED
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver_process", str(there.fileno())],
            cwd=ROOT, env=environment, pass_fds=[there.fileno()],
            process_group=0,  # Ctrl-C on a terminal is for pytest alone
        )  # fmt: skip
    if here.recv(64) != b"ready":
        raise RuntimeError("the fork server did not start; its own output says why")
    atexit.register(process.wait)
    atexit.register(here.close)  # the last to be registered is the first to be called
    return here


def fork_ranks(connection: socket.socket) -> None:
    """Have this process, which was forked, start its ranks by the server behind `connection`."""
    global _of_ranks
    _of_ranks = connection
    subprocess.Popen = PopenOfRanks  # type: ignore[assignment,misc]


@contextlib.contextmanager
def _adopts_orphans() -> Iterator[None]:
    """Be the parent of what a child of a child leaves behind. Source: prctl(2), PR_SET_CHILD_SUBREAPER."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0)


def python(
    *words: object, cwd: Path, timeout: float = 180, given: str = "", ranks: bool = False, code: int | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `python WORDS`, forked: `-m MODULE`, `-c CODE` or a file; `given` is what it reads on standard input.

    Fails where it ends with another exit code than `code`.
    """
    command = [str(word) for word in words]
    process = Popen(
        [sys.executable, *command], cwd=cwd, env=os.environ | environment, text=True, errors="surrogateescape",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, ranks=ranks, seconds=max(timeout - 1, 1),
    )  # fmt: skip
    with process:
        try:
            said = process.communicate(given, timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout, *process.communicate()) from None
    assert code is None or process.returncode == code, "".join(said)
    return subprocess.CompletedProcess(command, process.returncode, *said)
