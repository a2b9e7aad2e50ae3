"""The store in which the processes of a run meet: a key-value server of torch's, which torchrun's agent has, or rank 0.

A client of torch 2.13's waits for ever at a port where something else listens. So connections are made in a thread.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from gpt2_fp8.runtime import patience, signals
from gpt2_fp8.runtime.launched import Launcher
from gpt2_fp8.runtime.patience import NotMet

NAME_SECONDS = 45.0  # in which the name of a host is to resolve: it may be that of a machine that is just starting
ANSWER_SECONDS = 15.0  # in which a store answers; torch tries twice
AGENT_SECONDS = 30.0  # in which an agent answers that has been there before this process
_PROBE_SECONDS = 5.0


def connected(launcher: Launcher, seconds: float = 0.0) -> dist.Store:
    """Return the store of this process's run. `seconds`: to wait for it, if fewer than `patience` has.

    Raises NotMet if nothing is there, or something else, and if rank 0 cannot listen.
    """
    if launcher.rank == 0 and not launcher.agent_listens:
        with signals.interruptible():
            _resolve(launcher)
        return _listening(launcher)
    try:
        return _reached(launcher, seconds)
    except NotMet as error:
        error.told = bool(error.problems) and launcher.local_rank > 0  # the first of this node has met with it too
        raise


def _reached(launcher: Launcher, seconds: float) -> dist.Store:
    if launcher.agent_listens and not seconds:
        _find_agent(launcher)
    else:
        patience.wait(lambda: _unreached(launcher), seconds, says=launcher.local_rank == 0)
    try:
        store = _store(launcher, listens=False)
    except dist.DistError as error:
        raise NotMet(f"rank {launcher.rank} has lost the connection to {place(launcher)}") from error
    if store is None:
        raise NotMet.refused(f"what listens at {place(launcher)} is not rank 0 of a run", _ANOTHER)
    return store


def _find_agent(launcher: Launcher) -> None:
    """Wait until the agent answers, which has begun to listen before it starts a process. Raises NotMet."""
    try:
        patience.wait(lambda: _unreached(launcher), AGENT_SECONDS, says=False)
    except NotMet as error:
        if error.problems:
            raise
        raise NotMet.refused(
            f"{launcher.agent} does not answer at {place(launcher)}: a firewall, or it has ended",
            f"{launcher.name} again; if its variables are left of another run: unset TORCHELASTIC_RUN_ID RANK "
            "WORLD_SIZE LOCAL_RANK",
        ) from error


def place(launcher: Launcher) -> str:
    """Return where the processes meet, for a message."""
    return f"{launcher.address}:{launcher.port} (MASTER_ADDR, MASTER_PORT)"


_ANOTHER = "MASTER_PORT=NUMBER, another one, the same for every process of this run"


def _listening(launcher: Launcher) -> dist.Store:
    """Return rank 0's own store, which the others reach at its address."""
    try:
        store = _store(launcher, listens=True)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            cause = f"rank 0 cannot listen at port {launcher.port}, where another process does: of another run, perhaps"
            raise NotMet.refused(cause, _ANOTHER) from error
        if any(name in str(error) for name in ("EACCES", "EPERM")):
            raise NotMet.refused(f"rank 0 may not listen at port {launcher.port}", _ANOTHER) from error
        store = None
    if store is None:
        raise NotMet.refused(
            f"rank 0, which listens at port {launcher.port} of {socket.gethostname()}, does not find itself at "
            f"{place(launcher)}",
            "MASTER_ADDR=HOST, the name or address of rank 0's own host, the same for every process",
        )
    return store


def _unreached(launcher: Launcher) -> str:
    """Return what is waited for where nobody listens yet; empty if somebody does. Raises NotMet for a wrong name."""
    who = launcher.agent or "rank 0"
    _resolve(launcher)
    try:
        with socket.create_connection((launcher.address or "", launcher.port or 0), _PROBE_SECONDS):
            return ""
    except OSError as error:
        said = error.strerror or "no answer"
        return f"{who} at {place(launcher)}: {said}. A firewall, another MASTER_PORT, or it has not been started"


def _resolve(launcher: Launcher) -> None:
    """Wait until the name of rank 0's host is known. Raises NotMet if it is not for `NAME_SECONDS`."""
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(launcher.address, launcher.port)
            return
        except socket.gaierror as error:
            if time.monotonic() - began > NAME_SECONDS:
                cause = f"{launcher.address} (MASTER_ADDR) is no host that is known here: {error.strerror}"
                remedy = "the name or address of rank 0's host, the same for every process"
                raise NotMet.refused(cause, remedy) from error
            time.sleep(1.0)


def _store(launcher: Launcher, listens: bool) -> dist.Store | None:
    """Return a connection to the store, or None if what is there does not answer. Raises torch's errors."""
    done: queue.Queue[dist.Store | Exception] = queue.Queue()

    def connect() -> None:
        try:
            store = dist.TCPStore(
                str(launcher.address),
                int(launcher.port or 0),
                launcher.world_size,
                is_master=listens,
                timeout=timedelta(seconds=ANSWER_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
            )
            store.set_timeout(timedelta(seconds=patience.PATIENCE_SECONDS))
            done.put(store)
        except Exception as error:
            done.put(error)

    threading.Thread(target=connect, name="meeting", daemon=True).start()
    with signals.interruptible():
        try:
            found = done.get(timeout=2 * ANSWER_SECONDS)
        except queue.Empty:
            return None
    if isinstance(found, Exception):
        raise found
    return found
