"""Sweeps whose jobs run at the same time on this machine (`hydra/launcher=joblib`): what is refused, what is decided.

joblib gives the queue and its workers. Each worker starts its jobs in processes of their own (`train/sweep_worker.py`),
with a GPU of their own (`runtime/slots.py`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks, slots
from gpt2_fp8.runtime.sweep_room import OpenRoom

_KEYS = ("hydra.launcher.n_jobs", "hydra.launcher.verbose")


def is_chosen(settings: DictConfig) -> bool:
    """Return whether the launcher of `settings`, Hydra's own node, is joblib's."""
    return str(settings.launcher.get("_target_", "")).endswith("JoblibLauncher")


def inside_ranks() -> Iterator[Problem]:
    """Find that this process is one of several ranks, each of which would run the whole sweep."""
    started = ranks.current()
    if started.several:
        yield Problem(
            f"-m in each of {started.world_size:,} processes of {started.launcher}: each would run the whole sweep",
            "start the sweep once, without that launcher: -m hydra/launcher=joblib runs a job on each GPU of this "
            "machine (pip install hydra-joblib-launcher); or start each run by itself, without -m",
        )


def check(settings: DictConfig, typed: Collection[str]) -> Iterator[Finding]:
    """Find what is wrong with joblib's own keys. `typed`: the keys of the command line."""
    for key in sorted(key for key in typed if key.startswith("hydra.launcher.") and key not in _KEYS):
        cause = f"{key}: of joblib's settings, only n_jobs and verbose mean something here"
        limit = "; a limit on a job's time is trainer.max_time" if key.endswith("timeout") else ""
        yield Finding((key,), Problem(cause, f"leave it out{limit}"))
    asked, key = settings.launcher.n_jobs, "hydra.launcher.n_jobs"
    gpus = slots.gpus()
    if asked != -1 and asked < 1:
        yield Finding((key,), Problem(f"{key}={show(asked)}: must be 1 or more", f"leave it out: {_every(gpus)}"))


def check_job(config: RunConfig, settings: DictConfig) -> Iterator[Finding]:
    """Find why a job of `config` cannot run beside others, each of which has one GPU."""
    trainer, asked, gpus = config.trainer, settings.launcher.n_jobs, slots.gpus()
    if trainer.devices not in (1, "auto") or trainer.num_nodes != 1:
        values = f"trainer.devices={show(trainer.devices)}, trainer.num_nodes={trainer.num_nodes}"
        cause = f"{values} with hydra/launcher=joblib: each job has one GPU, or a share of the CPU"
        remedy = "leave both out, for a GPU a job; or start the runs one by one, without -m"
        yield Finding(("trainer.devices", "trainer.num_nodes"), Problem(cause, remedy))
    if trainer.accelerator != "cpu" and gpus and asked > len(gpus):
        cause = f"hydra.launcher.n_jobs={asked}, and there are {len(gpus)} GPUs here: no two jobs share one"
        remedy = f"hydra.launcher.n_jobs={len(gpus)}, or leave it out: {_every(gpus)}"
        yield Finding(("hydra.launcher.n_jobs",), Problem(cause, remedy))


def begin(config: DictConfig, words: Sequence[Sequence[str]] | None) -> OpenRoom:
    """Decide how many jobs run at the same time, tell joblib, log it, and open the sweep's room. Raises OSError.

    `words`: those of each job; None if the sweeper chooses them while it runs.
    """
    from joblib import cpu_count  # it knows a container's share too

    cpus, gpus = int(cpu_count()), slots.gpus()
    if OmegaConf.select(config, "trainer.accelerator", throw_on_missing=False) == "cpu":  # of all jobs
        gpus = []
    asked = config.hydra.launcher.n_jobs
    places = len(gpus) or cpus
    at_once = places if asked == -1 else asked
    together = len(words) if words is not None else int(config.hydra.sweeper.get("n_jobs") or at_once)
    at_once = max(1, min(at_once, together))
    with read_write(config), open_dict(config):
        config.hydra.launcher.n_jobs = at_once
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpus // at_once))
    called = slots.shown(gpus)
    where = f"a GPU each: {', '.join(called.values())}" if gpus else "on the CPU"
    jobs = "1 job" if at_once == 1 else f"{at_once:,} jobs"
    print(f"sweep: {jobs} at a time, {where}; CPU threads of a job: {threads} (OMP_NUM_THREADS)", flush=True)
    shared = sorted(set.intersection(*map(set, words))) if words is not None and len(words) > 1 else []
    return OpenRoom(called, at_once, max(1, cpus // at_once), shared)


def job_logging(settings: Any, folder: Path) -> tuple[dict[str, Any], Path]:
    """Return a job's `logging.config` without what writes to the terminal, and the file that its log is.

    `settings`: Hydra's own node. Lines of several jobs would tear each other on a terminal. A configuration without a
    file keeps its handlers, and their lines go to `run.log`.
    """
    plain: Any = OmegaConf.to_container(settings.job_logging, resolve=True)
    handlers = plain.get("handlers") or {}
    files = {name: handler for name, handler in handlers.items() if "filename" in handler}
    if files:
        plain["handlers"] = files
        for node in (plain.get("root") or {}, *(plain.get("loggers") or {}).values()):
            if "handlers" in node:
                node["handlers"] = [name for name in node["handlers"] if name in files]
    if settings.verbose is True:
        plain.setdefault("root", {})["level"] = "DEBUG"
    elif settings.verbose:
        names = [settings.verbose] if isinstance(settings.verbose, str) else list(settings.verbose)
        for name in names:
            plain.setdefault("loggers", {}).setdefault(name, {})["level"] = "DEBUG"
    output = next((Path(handler["filename"]) for handler in files.values()), folder / "run.log")
    return plain, output


def _every(gpus: Sequence[str]) -> str:
    return f"-1, a job on each of {len(gpus)} GPUs" if gpus else "-1, a job on each CPU"
