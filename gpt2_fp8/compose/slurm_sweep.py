"""A sweep whose jobs SLURM runs (`hydra/launcher=slurm`): what they must have in common; the wait for their ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.config import slurm_launcher
from gpt2_fp8.config.errors import Problem, RunError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks

_CHOICE = f"hydra/launcher={slurm_launcher.NAME}"
_CHOSEN = "hydra.runtime.choices.hydra/launcher"
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


def check(whole: DictConfig, configs: Sequence[RunConfig], multirun: bool) -> Iterator[Problem]:
    """Find what SLURM cannot run as one array of jobs. `whole`: what the sweep's words come to without its values.

    `configs`: the jobs. `multirun`: whether they are a sweep's. Yields nothing for another launcher.
    """
    if not slurm_launcher.is_chosen(whole.hydra.launcher.get("_target_")):
        return
    if OmegaConf.select(whole, _CHOSEN) == slurm_launcher.BASE:
        cause = f"hydra/launcher={slurm_launcher.BASE} asks SLURM for no GPU and one core, unless it is told"
        yield Problem(cause, f"{_CHOICE}, the same launcher, which asks for what the run needs")
        return
    if not multirun:
        yield Problem(f"{_CHOICE}: a single run would begin here, not on SLURM", _alone())
        return
    if any(config.trainer.devices == "auto" for config in configs):
        cause = "trainer.devices=auto: SLURM must be told how many GPUs of a node a job is to have"
        yield Problem(cause, "trainer.devices=8, for instance")
        return
    for key in _KEYS:
        asked = OmegaConf.select(whole, key)
        others = {value for config in configs if (value := getattr(config.trainer, key.partition(".")[2])) != asked}
        if others:
            cause = f"{key}={show(next(iter(others)))}: the jobs of one sweep get the same of SLURM, {show(asked)}"
            yield Problem(cause, f"one value of {key} for the sweep; another sweep for another value")


def _alone() -> str:
    if ranks.current().several:  # -m would be refused: each process would send the sweep
        return f"leave {_CHOICE} out: the processes have been started, and train together"
    return "put -m in front, to send it"


def lacking(whole: DictConfig, multirun: bool) -> Iterator[Problem]:
    """Find that a sweep is to be sent to SLURM, by a word or a file, and that there is none on this machine."""
    missing = [name for name in ("srun", "sbatch") if shutil.which(name) is None]
    if multirun and missing and slurm_launcher.is_chosen(whole.hydra.launcher.get("_target_")):
        choice = f"hydra/launcher={OmegaConf.select(whole, _CHOSEN)}"
        cause = f"{choice}: there is no {' or '.join(missing)} on this machine"
        yield Problem(cause, f"type it where the cluster takes jobs; without {choice}, they run here")


def begin(settings: DictConfig) -> None:
    """See to it that the ends of jobs are seen, if SLURM is to run them. `settings`: Hydra's own node."""
    if slurm_launcher.is_chosen(settings.launcher.get("_target_")):
        from gpt2_fp8.compose import slurm_ends

        if said := slurm_ends.watch():
            print(said, flush=True)


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
