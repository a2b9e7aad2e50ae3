"""Starts the ranks of a run on this node, by torch's elastic agent in this process. torchrun does the same.

The ranks' exit codes come through, which torchrun makes 1, and their signals are those of this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from gpt2_fp8.compat.torch_private import agent_waits
from gpt2_fp8.runtime import programs, ranks, signals, slurm

SAVE_SECONDS = 600  # that the ranks have to save and end after a signal


def launch(count: int, words: Sequence[str]) -> int:
    """Run this program with `words` as `count` ranks; returns the exit code of the one that failed first."""
    for name in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    asked = (*signals.SIGNALS, *slurm.REQUEUE_SIGNALS) if ranks.is_batch_job() else signals.SIGNALS
    handled = [each.name for each in asked if signal.getsignal(each) != signal.SIG_IGN]  # nohup
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=ranks.OWN_ID, max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(handled), **agent_waits(SAVE_SECONDS),
    )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    try:
        launch_agent(config, sys.executable, [*_program(), *words])
    except ChildFailedError as error:
        rank, failed = error.get_first_failure()
        if failed.exitcode >= 0:
            return failed.exitcode  # it has said why
        if -failed.exitcode in signals.SIGNALS:
            return _code(-failed.exitcode)
        name = signal.Signals(-failed.exitcode).name
        programs.say(f"rank {rank} (process {failed.pid}) was killed by {name}, and the others were ended")
        return 1
    except SignalException as error:
        return _code(error.sigval)
    return 0


def _program() -> list[str]:
    """Return how Python starts this program: by its module, or by a script that calls `run.main`."""
    is_script = getattr(sys.modules["__main__"], "__spec__", None) is None and sys.argv[0].endswith(".py")
    return [sys.argv[0]] if is_script else ["-m", "gpt2_fp8.run"]


def _code(signum: int) -> int:
    return 128 + (signal.SIGTERM if signum in signals.LIKE_SIGTERM else signum)
