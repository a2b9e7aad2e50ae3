"""torchrun's agent, the parent of the ranks that it has started. Standard library only.

The agent starts each rank in a session of its own. So ranks that it leaves behind, because it was killed, get no signal
from anybody. They would go on holding their GPUs.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from gpt2_fp8.runtime import launched, process_end, signals

_LOOK_SECONDS = 0.5

_gone = threading.Event()


def follow() -> None:
    """Have this process stop, as at SIGTERM, when the agent that has started it is gone. Without one, do nothing."""
    if name := launched.agent(os.environ):
        threading.Thread(target=_watch, args=(name, os.getppid()), name="agent", daemon=True).start()


def is_gone() -> bool:
    """Return whether the agent that has started this process is gone, and perhaps the store that it had."""
    return _gone.is_set()


def _watch(name: str, agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(_LOOK_SECONDS)
    _gone.set()
    if signals.received() is not None:  # this process is ending; a second signal would end it before it has saved
        return
    if os.environ.get("LOCAL_RANK") == "0":
        process_end.say(f"\n{name}'s agent (process {agent}) is gone, and its processes stop\n")
    os.kill(os.getpid(), signal.SIGTERM)
