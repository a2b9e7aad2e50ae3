"""The jobs of a sweep, the note that Hydra begins it, and who runs them: this process, joblib or SLURM.

Hydra does not tell a callback that a sweep has ended if a job has failed or a signal came. So the program writes the
table itself, from what is noted here. With `hydra/launcher=joblib`, each of joblib's workers runs a job in a process of
its own, on a GPU of its own (`train/sweep_job.py`). Ctrl-C would reach the workers while their jobs save, so only the
first process acts on signals, and tells the workers by a file. `hydra/launcher=slurm` runs the jobs as one array.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.compose.commandline import parse_override, strip_force
from gpt2_fp8.config import own_words
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import problem, show, value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import line
from gpt2_fp8.runtime import gpu_locks, ranks, signals, slurm

_begun: list[Path] = []  # the folder of each sweep of this process that has not been taken
STOP = ".stop"  # in a sweep's folder: the number of the signal for which its jobs are to end
LOOK_SECONDS = 0.2
_CHOICE = "hydra/launcher=slurm"
_KEYS = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes")


def _is_basic(sweeper: DictConfig) -> bool:
    """Return whether a sweeper is Hydra's own: it runs all combinations, which are known before."""
    return str(sweeper.get("_target_", "")).endswith("BasicSweeper")


def expand(overrides: list[Override], sweeper: DictConfig) -> list[list[Override]]:
    """Return the words of each job, as Hydra's basic sweeper forms them, or another's first job. Raises UserError."""
    last = {(override.key_or_group, override.package): override for override in overrides}
    same = [override for override in last.values() if not override.is_sweep_override()]
    swept = [override for override in last.values() if override.is_sweep_override()]
    if not _is_basic(sweeper):
        swept = [_start(override) for override in swept]
    try:
        words = hydra_private.job_words(swept)
    except HydraException as error:
        raise UserError.of(str(error).splitlines()[0]) from None
    jobs_ = [[*same, *map(parse_override, job)] for job in words]
    return jobs_ if _is_basic(sweeper) else jobs_[:1]


def _start(override: Override) -> Override:
    """Return the override; for an interval, which has no end of values, its start."""
    sweep = override.value()
    return (
        parse_override(f"{override.get_key_element()}={sweep.start}") if isinstance(sweep, IntervalSweep) else override
    )


def take() -> Path | None:
    """Return the folder of the sweep that has begun in this process, once; None if there was none."""
    return _begun.pop() if _begun else None


def begun() -> Path | None:
    """Return the folder of the sweep that has begun in this process; None if there is none."""
    return _begun[-1] if _begun else None


class SweepStart(Callback):
    """What `hydra.callbacks` of `conf/config.yaml` names. It has no state, since launchers send it to their jobs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the sweep's folder, and write its plan there."""
        folder = Path(str(config.hydra.sweep.dir)).absolute()  # absolute, as jobs may change the current folder
        _begun.append(folder)
        words = _words(config)
        try:
            own_words.write_plan(folder, words)
        except OSError as error:
            print(line(f"warning: {folder} cannot be written: {error}"), file=sys.stderr)
        if is_joblib(config.hydra):
            begin_joblib(config, folder, words)


def _words(config: DictConfig) -> list[list[str]] | None:
    """Return the words of each job, as the basic sweeper will form them; None for another sweeper, which chooses."""
    if not _is_basic(config.hydra.sweeper):
        return None
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # ${...} is each job's own
    overrides = [parse_override(word) for word in [*words, *typed]]
    if any(isinstance(override.value(), Glob) for override in overrides):  # only Hydra knows what it matches
        return None
    return list(map(strip_force, hydra_private.job_words(overrides)))


# ---- joblib ----------------------------------------------------------------------------------------------------------


def is_joblib(settings: Any) -> bool:
    """Return whether the launcher of `settings`, Hydra's own node, is joblib's."""
    return str(settings.launcher.get("_target_", "")).endswith("JoblibLauncher")


def check_joblib(config: RunConfig) -> Iterator[Problem]:
    """Find why a job of `config` cannot run beside others, each of which has one GPU."""
    if config.trainer.devices not in (1, "auto") or config.trainer.num_nodes != 1:
        reason = "with hydra/launcher=joblib each job has one GPU, or a share of the CPU"
        yield problem(config, "trainer.devices trainer.num_nodes", reason)
    if config.trainer.max_restarts:
        yield problem(config, "trainer.max_restarts", "hydra/launcher=joblib starts each job once")


def begin_joblib(config: DictConfig, folder: Path, words: Sequence[Sequence[str]] | None) -> None:
    """Decide how many jobs run at a time, tell joblib and the log, and hold signals. `words`: each job's, if known."""
    from joblib import cpu_count  # it knows a container's share too

    on_cpu = OmegaConf.select(config, "trainer.accelerator", throw_on_missing=False) == "cpu"
    cpus, gpus = int(cpu_count()), [] if on_cpu else gpu_locks.list_gpus()
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
    while (signum := signals.get_received()) is None:
        time.sleep(LOOK_SECONDS)
    with suppress(OSError):
        (folder / STOP).write_text(str(signum if signum == signal.SIGINT else int(signal.SIGTERM)))


# ---- SLURM -----------------------------------------------------------------------------------------------------------


def _gpus(_root_: DictConfig) -> Any:
    """Return the GPUs of a node that a run needs; None on a CPU."""
    return None if OmegaConf.select(_root_, "trainer.accelerator") == "cpu" else _root_.trainer.devices


def _cores(_root_: DictConfig) -> int:
    """Return the cores that a process needs: one, and one for each data worker, of a mixture those of all sources."""
    sources = OmegaConf.select(_root_, "data.sources", default={"": _root_.data})
    return 1 + sum(int(source.get("num_workers", 0)) for source in sources.values())


# for `conf/hydra/launcher/slurm.yaml`
OmegaConf.register_new_resolver("slurm.gpus", _gpus, replace=True)
OmegaConf.register_new_resolver("slurm.cores", _cores, replace=True)


def is_slurm(cfg: DictConfig) -> bool:
    """Return whether SLURM is to run the jobs of a sweep."""
    return str(cfg.hydra.launcher.get("_target_")).endswith(".SlurmLauncher")


def check_slurm(
    whole: DictConfig, configs: Sequence[RunConfig], multirun: bool, begins: bool = False
) -> Iterator[Problem]:
    """Find what SLURM cannot run as one array. `whole`: what all jobs have. `begins`: whether it is sent from here."""
    if not is_slurm(whole):
        return
    if not multirun:
        yield Problem(f"{_CHOICE}: a single run would begin here, not on SLURM", "put -m in front, to send it")
    elif begins and (missing := [name for name in ("srun", "sbatch", "sacct") if not shutil.which(name)]):
        yield Problem(f"{_CHOICE}: there is no {' or '.join(missing)} on this machine")
    if multirun and any(config.trainer.devices == "auto" for config in configs):
        cause = "trainer.devices=auto: SLURM must be told how many GPUs of a node a job is to have"
        yield Problem(cause, "trainer.devices=NUMBER")
    several = [config for config in configs if (config.trainer.devices, config.trainer.num_nodes) != (1, 1)]
    if any(config.trainer.max_restarts for config in several):
        yield Problem("trainer.max_restarts: SLURM starts the ranks of a job", keys=("trainer.max_restarts",))
    for key in _KEYS:
        asked = OmegaConf.select(whole, key)
        others = {value for config in configs if (value := value_of(config, key)) != asked}
        if others:
            yield Problem(f"{key}={show(next(iter(others)))}: SLURM gives all jobs of a sweep the same, {show(asked)}")


def wait_for_jobs(folder: Path) -> None:
    """Wait until SLURM has ended every job of a sweep: the launcher stops waiting at the first that was killed."""
    names = sorted(path.parent.name for path in (folder / ".submitit").glob("*/*_submitted.pkl"))
    if names:
        from submitit import SlurmJob

        jobs: list[SlurmJob[Any]] = [SlurmJob(folder / ".submitit/%j", job_id=name, tasks=[0]) for name in names]
        for job in jobs:
            job.wait()
