"""A sweep whose jobs SLURM runs (`hydra/launcher=slurm`): what they must have in common; the wait for their ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.config.errors import Problem, RunError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig

_CHOICE = "hydra/launcher=slurm"
_FOLDER = ".submitit"  # in the sweep's
_KEYS = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes")


def _gpus(_root_: DictConfig) -> Any:
    """Return the GPUs of a node that a run needs; None on a CPU."""
    return None if OmegaConf.select(_root_, "trainer.accelerator") == "cpu" else _root_.trainer.devices


def _cores(_root_: DictConfig) -> int:
    """Return the cores that a process needs: one, and one for each data worker."""
    return 1 + int(OmegaConf.select(_root_, "data.num_workers", default=0))


# for `conf/hydra/launcher/slurm.yaml`
OmegaConf.register_new_resolver("slurm.gpus", _gpus, replace=True)
OmegaConf.register_new_resolver("slurm.cores", _cores, replace=True)


def is_chosen(cfg: DictConfig) -> bool:
    """Return whether SLURM is to run the jobs of a sweep."""
    return str(cfg.hydra.launcher.get("_target_")).endswith(".SlurmLauncher")


def check(whole: DictConfig, configs: Sequence[RunConfig], multirun: bool) -> Iterator[Problem]:
    """Find what SLURM cannot run as one array of jobs. `whole`: what the sweep's words come to without its values.

    `configs`: the jobs. `multirun`: whether they are a sweep's. Yields nothing for another launcher.
    """
    if not is_chosen(whole):
        return
    if not multirun:
        yield Problem(f"{_CHOICE}: a single run would begin here, not on SLURM", "put -m in front, to send it")
    elif any(config.trainer.devices == "auto" for config in configs):
        cause = "trainer.devices=auto: SLURM must be told how many GPUs of a node a job is to have"
        yield Problem(cause, "trainer.devices=NUMBER")
    for key in _KEYS:
        asked = OmegaConf.select(whole, key)
        others = {value for config in configs if (value := getattr(config.trainer, key.partition(".")[2])) != asked}
        if others:
            yield Problem(f"{key}={show(next(iter(others)))}: SLURM gives all jobs of a sweep the same, {show(asked)}")


def lacking(whole: DictConfig, multirun: bool) -> Iterator[Problem]:
    """Find that a sweep is to be sent to SLURM, by a word or a file, and that there is none on this machine."""
    if multirun and is_chosen(whole) and (missing := [n for n in ("srun", "sbatch", "sacct") if not shutil.which(n)]):
        yield Problem(f"{_CHOICE}: there is no {' or '.join(missing)} on this machine")


def wait(folder: Path) -> None:
    """Wait until every job of the sweep in `folder` has ended; at once if SLURM has none of it.

    The launcher stops waiting at the first job that was killed.
    """
    if names := _jobs(folder):
        from submitit import SlurmJob

        jobs: list[SlurmJob[Any]] = [SlurmJob(folder / _FOLDER / "%j", job_id=name, tasks=[0]) for name in names]
        for job in jobs:
            job.wait()


def still_there(folder: Path) -> str | None:
    """Return what to say of a sweep that is left while its jobs may run on; None if all have a result."""
    left = sorted({name.partition("_")[0] for name in _jobs(folder) if not _result(folder, name).exists()})
    if not left:
        return None
    return (
        f"SLURM goes on with the jobs of this sweep: `squeue` shows them, `scancel {' '.join(left)}` ends them, and "
        f"`python -m gpt2_fp8.table {folder}` makes the table again"
    )


def lost(error: BaseException) -> RunError | None:
    """Return the end of a sweep of which a job was killed, or could not be sent; None for any other error."""
    if not type(error).__module__.startswith("submitit."):
        return None
    told = [line for line in str(error).splitlines() if line.strip()]
    return RunError(f"error: {' '.join(told[:3])}\n  fix: the job's log, in {_FOLDER} of the sweep's folder, says more")


def _jobs(folder: Path) -> list[str]:
    """Return SLURM's numbers of the jobs that were sent."""
    return sorted(path.parent.name for path in (folder / _FOLDER).glob("*/*_submitted.pkl"))


def _result(folder: Path, name: str) -> Path:
    return folder / _FOLDER / name / f"{name}_0_result.pkl"
