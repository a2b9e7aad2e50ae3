"""The process of one job of a parallel sweep: `python -m gpt2_fp8.train.sweep_job < REQUEST`, started by its worker.

The request and the answer are JSON. The environment names the GPU before this process has imported torch.
"""

from __future__ import annotations

import json
import logging.config
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from gpt2_fp8.config import parsing
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import output, process_end, programs, signals, slurm
from gpt2_fp8.runtime.signal_handlers import Signals
from gpt2_fp8.train import loading

log = logging.getLogger(__name__)


def main() -> int:
    """Run the job that the standard input describes, write its answer, and return the exit code."""
    request = json.load(sys.stdin)
    os.set_inheritable(request["slot"], False)  # the place is free when this process ends, whatever it has started
    with signals.handled() as handlers:
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
        try:
            with handlers.at_once():
                answer: dict[str, Any] = {"val_loss": _run(request)}
        except BaseException as caught:
            handlers.hold()
            error = _known(caught, handlers)
            answer = {"error": {"status": error.status, "exit_code": error.exit_code, "message": str(error)}}
    Path(request["answer"]).write_text(json.dumps(answer))
    return int(answer.get("error", {}).get("exit_code", 0))


def _run(request: dict[str, Any]) -> float | None:
    logging.config.dictConfig(request["logging"])
    output.forgive_outputs()
    config, problems = parsing.build(RunConfig, request["config"])
    assert config is not None, problems
    folder, words = Path(request["folder"]), request["words"]
    log.info("%s: loading torch, some seconds", programs.VERSION)
    return loading.training(config, folder, Path(request["here"]), words)(config, folder, words, None)


def _known(caught: BaseException, handlers: Signals) -> RunError:
    """Return the end that `caught` is; a signal's if one was thrown, which may have caused other errors."""
    if isinstance(caught, RunError):
        return caught
    if handlers.thrown:
        assert handlers.received is not None
        return slurm.ended(handlers.received)
    traceback.print_exception(caught)
    return RunError(f"{type(caught).__name__}: {caught}")


def _end_after(worker: int) -> None:
    """Save and end if the worker is gone: nobody else knows of this process then."""
    while os.getppid() == worker:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def entry() -> None:
    """Run the program."""
    output.begin()
    process_end.ignore_at_the_end()
    code = main()
    process_end.leave_with(code)
    output.end()
    sys.exit(code)


if __name__ == "__main__":
    entry()
