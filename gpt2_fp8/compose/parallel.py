"""Sweeps whose jobs run at the same time on this machine (`hydra/launcher=joblib`).

joblib gives the queue and its workers. Each worker runs a job in a process of its own, on a GPU of its own
(`train/sweep_job.py`). Ctrl-C reaches a whole process group, and would tear down the workers while their jobs save. So
only the first process acts on signals, and the workers read from a file in the sweep's folder that they are to stop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import gpu_locks, ranks, signals, slurm

STOP = ".stop"  # in a sweep's folder: the number of the signal for which its jobs are to end
LOOK_SECONDS = 0.2


def is_chosen(settings: Any) -> bool:
    """Return whether the launcher of `settings`, Hydra's own node, is joblib's."""
    return str(settings.launcher.get("_target_", "")).endswith("JoblibLauncher")


def inside_ranks() -> Iterator[Problem]:
    """Find that this process is one of several ranks, each of which would run the whole sweep."""
    started = ranks.current()
    if started.several:
        cause = f"-m in each of {started.world_size:,} processes of {started.launcher}: each would run the whole sweep"
        yield Problem(cause, "start the sweep once, without that launcher: -m hydra/launcher=joblib")


def check_job(config: RunConfig) -> Iterator[Finding]:
    """Find why a job of `config` cannot run beside others, each of which has one GPU."""
    trainer = config.trainer
    if trainer.devices not in (1, "auto") or trainer.num_nodes != 1:
        values = f"trainer.devices={show(trainer.devices)}, trainer.num_nodes={trainer.num_nodes}"
        cause = f"{values} with hydra/launcher=joblib: each job has one GPU, or a share of the CPU"
        yield Finding(("trainer.devices", "trainer.num_nodes"), Problem(cause, "leave both out"))


def begin(config: DictConfig, folder: Path, words: Sequence[Sequence[str]] | None) -> None:
    """Decide how many jobs run at the same time, tell joblib, log it, and hold signals for the jobs.

    `folder`: the sweep's. `words`: those of each job; None if the sweeper chooses them while it runs.
    """
    from joblib import cpu_count  # it knows a container's share too

    on_cpu = OmegaConf.select(config, "trainer.accelerator", throw_on_missing=False) == "cpu"
    cpus, gpus = int(cpu_count()), [] if on_cpu else gpu_locks.visible()
    asked = int(config.hydra.launcher.n_jobs)
    at_once = asked if asked > 0 else len(gpus) or cpus
    at_once = max(1, min(at_once, at_once if words is None else len(words)))
    with read_write(config), open_dict(config):
        config.hydra.launcher.n_jobs = at_once
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus // at_once)))
    where = f"a GPU each: {', '.join(gpus)}" if gpus else "on the CPU"
    print(f"sweep: jobs at a time: {at_once:,}, {where}; OMP_NUM_THREADS={threads}", flush=True)
    (folder / STOP).unlink(missing_ok=True)
    signals.hold()
    threading.Thread(target=_pass_on, args=[folder], name="sweep", daemon=True).start()
    if ranks.is_batch_job():  # SLURM signals every process of a job; joblib's, which inherit this, would die of it
        signal.pthread_sigmask(signal.SIG_BLOCK, slurm.REQUEUE_SIGNALS)


def _pass_on(folder: Path) -> None:
    while (signum := signals.received()) is None:
        time.sleep(LOOK_SECONDS)
    with suppress(OSError):
        (folder / STOP).write_text(str(signum if signum == signal.SIGINT else int(signal.SIGTERM)))
