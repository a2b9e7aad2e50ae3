"""Who runs the jobs of a sweep: joblib, several at a time on this machine, or SLURM.

joblib (`hydra/launcher=joblib`) gives the queue and its workers. Each worker runs a job in a process of its own, on a
GPU of its own (`train/sweep_job.py`). Ctrl-C reaches a whole process group, and would tear down the workers while their
jobs save. So only the first process acts on signals, and the workers read from a file in the sweep's folder that they
are to stop. SLURM (`hydra/launcher=slurm`) runs the jobs as one array.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gpt2_fp8.config.errors import Problem, RunError
from gpt2_fp8.config.keys import problem, show, value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import gpu_locks, ranks, signals, slurm

STOP = ".stop"  # in a sweep's folder: the number of the signal for which its jobs are to end
LOOK_SECONDS = 0.2
_CHOICE = "hydra/launcher=slurm"
_FOLDER = ".submitit"  # in the sweep's
_KEYS = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes")


def is_joblib(settings: Any) -> bool:
    """Return whether the launcher of `settings`, Hydra's own node, is joblib's."""
    return str(settings.launcher.get("_target_", "")).endswith("JoblibLauncher")


def check_ranks() -> list[Problem]:
    """Find that this process is one of several ranks, each of which would run the whole sweep."""
    started = ranks.current()
    cause = f"-m in each of {started.world_size:,} processes of {started.launcher}: each would run the whole sweep"
    return [Problem(cause, "start the sweep once, without that launcher")] if started.several else []


def check_joblib(config: RunConfig) -> Iterator[Problem]:
    """Find why a job of `config` cannot run beside others, each of which has one GPU."""
    if config.trainer.devices not in (1, "auto") or config.trainer.num_nodes != 1:
        reason = "with hydra/launcher=joblib each job has one GPU, or a share of the CPU"
        yield problem(config, "trainer.devices trainer.num_nodes", reason)


def begin_joblib(config: DictConfig, folder: Path, words: Sequence[Sequence[str]] | None) -> None:
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


def _gpus(_root_: DictConfig) -> Any:
    """Return the GPUs of a node that a run needs; None on a CPU."""
    return None if OmegaConf.select(_root_, "trainer.accelerator") == "cpu" else _root_.trainer.devices


def _cores(_root_: DictConfig) -> int:
    """Return the cores that a process needs: one, and one for each data worker."""
    return 1 + int(OmegaConf.select(_root_, "data.num_workers", default=0))


# for `conf/hydra/launcher/slurm.yaml`
OmegaConf.register_new_resolver("slurm.gpus", _gpus, replace=True)
OmegaConf.register_new_resolver("slurm.cores", _cores, replace=True)


def is_slurm(cfg: DictConfig) -> bool:
    """Return whether SLURM is to run the jobs of a sweep."""
    return str(cfg.hydra.launcher.get("_target_")).endswith(".SlurmLauncher")


def check_slurm(
    whole: DictConfig, configs: Sequence[RunConfig], multirun: bool, begins: bool = False
) -> Iterator[Problem]:
    """Find what SLURM cannot run as one array of jobs. `whole`: what the sweep's words come to without its values.

    `configs`: the jobs. `multirun`: whether they are a sweep's. `begins`: it is sent from here, so SLURM is
    to be here. Yields nothing for another launcher.
    """
    if not is_slurm(whole):
        return
    if not multirun:
        yield Problem(f"{_CHOICE}: a single run would begin here, not on SLURM", "put -m in front, to send it")
    elif begins and (missing := [name for name in ("srun", "sbatch", "sacct") if not shutil.which(name)]):
        yield Problem(f"{_CHOICE}: there is no {' or '.join(missing)} on this machine")
    if multirun and any(config.trainer.devices == "auto" for config in configs):
        cause = "trainer.devices=auto: SLURM must be told how many GPUs of a node a job is to have"
        yield Problem(cause, "trainer.devices=NUMBER")
    for key in _KEYS:
        asked = OmegaConf.select(whole, key)
        others = {value for config in configs if (value := value_of(config, key)) != asked}
        if others:
            yield Problem(f"{key}={show(next(iter(others)))}: SLURM gives all jobs of a sweep the same, {show(asked)}")


def wait_for_jobs(folder: Path) -> None:
    """Wait until every job of the sweep in `folder` has ended; at once if SLURM has none of it.

    The launcher stops waiting at the first job that was killed.
    """
    if names := _jobs(folder):
        from submitit import SlurmJob

        jobs: list[SlurmJob[Any]] = [SlurmJob(folder / _FOLDER / "%j", job_id=name, tasks=[0]) for name in names]
        for job in jobs:
            job.wait()


def describe_left(folder: Path) -> str | None:
    """Return what to say of a sweep that is left while its jobs may run on; None if all have a result."""
    jobs = [name for name in _jobs(folder) if not (folder / _FOLDER / name / f"{name}_0_result.pkl").exists()]
    left = sorted({name.partition("_")[0] for name in jobs})
    if not left:
        return None
    return (
        f"SLURM goes on with the jobs of this sweep: `squeue` shows them, `scancel {' '.join(left)}` ends them, and "
        f"`python -m gpt2_fp8.table {folder}` makes the table again"
    )


def as_run_error(error: BaseException) -> RunError | None:
    """Return the end of a sweep of which a job was killed, or could not be sent; None for any other error."""
    if not type(error).__module__.startswith("submitit."):
        return None
    told = [line for line in str(error).splitlines() if line.strip()]
    return RunError(f"error: {' '.join(told[:3])}\n  fix: the job's log, in {_FOLDER} of the sweep's folder, says more")


def _jobs(folder: Path) -> list[str]:
    """Return SLURM's numbers of the jobs that were sent."""
    return sorted(path.parent.name for path in (folder / _FOLDER).glob("*/*_submitted.pkl"))
