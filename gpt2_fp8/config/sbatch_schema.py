"""The keys of `sbatch`: what is asked of SLURM for a run. Their names are sbatch's options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from gpt2_fp8.config.data_schema import TextData
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.key_types import Count
from gpt2_fp8.config.keys import finding, show
from gpt2_fp8.config.ranges import from_to
from gpt2_fp8.config.schema import RunConfig

PREFIX = "slurm"
_DELAY = from_to(10, 3600, "choose seconds, such as {key}=120")
_NAME = re.compile(r"[\w.,:@|&*()\[\]+=%/!-]+")  # of a partition, an account, a constraint
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_FOLDER = re.compile(r"[/$][\w./${}:+-]*")  # variables are the node's
_OPTION = re.compile(r"--([a-z][a-z-]*)(=[^\n]*)?")
OWN = (
    "job-name", "chdir", "output", "error", "open-mode", "nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node",
    "gpus-per-task", "cpus-per-task", "time", "partition", "account", "qos", "constraint", "mem", "signal", "requeue",
    "no-requeue", "array", "wrap",
)  # fmt: skip

INSTEAD = {  # of sbatch's words, a run's
    "array": "-m hydra/launcher=slurm sends several runs, in an array",
    "nodes": "trainer.num_nodes=N",
    "job-name": "run_name=NAME",
    "gres": "trainer.devices=N; slurm.gpu_type=KIND for GPUs of a kind",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task"), "trainer.devices=N"),
}


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What the script asks for. `--help` shows the text beside each type."""

    partition: Annotated[str | None, "the queue; null: the cluster's own choice, as of the next four"] = None
    account: Annotated[str | None, "who pays"] = None
    qos: Annotated[str | None, "quality of service"] = None
    constraint: Annotated[str | None, "features of a node, such as h100"] = None
    time: Annotated[str | None, "the limit: minutes, H:MM:SS or DAYS-HOURS; a run goes on in its next turn"] = None
    mem: Annotated[str | None, "memory of a node, such as 64G; 0: all of it"] = None
    gpu_type: Annotated[str | None, "such as h100, where the cluster tells GPUs apart"] = None
    cpus_per_task: Annotated[Count | None, "cores of a process; null: one, and one for each data worker"] = None
    signal_delay_s: Annotated[
        Annotated[int, _DELAY], "so many seconds before the limit, SLURM asks the run to save and queue again"
    ] = 120
    scratch: Annotated[str, "a folder on each node's own disk, for caches"] = "${TMPDIR:-/tmp}"
    copy_tokens: Annotated[bool, "copy data.cache_dir there first, and read the copy"] = False
    setup: Annotated[list[str], "lines of shell before the run, such as [module load cuda]"] = field(
        default_factory=list
    )
    options: Annotated[list[str], 'more options of sbatch: ["--exclusive","--mail-type=END"]'] = field(
        default_factory=list
    )


@dataclass(frozen=True, kw_only=True)
class SbatchRunConfig(RunConfig):
    """All that the command line knows: a run's keys and those of `slurm`."""

    slurm: SlurmConfig


def check(slurm: SlurmConfig) -> Iterator[Finding]:
    """Find what is wrong with settings whose types and ranges are right."""
    for key in ("partition", "account", "qos", "constraint", "gpu_type"):
        if (value := getattr(slurm, key)) is not None and not _NAME.fullmatch(value):
            yield _finding(slurm, key, "is no name that SLURM has", f"{PREFIX}.{key}=NAME, as `sinfo` shows it")
    if slurm.time is not None and not _TIME.fullmatch(slurm.time):
        yield _finding(slurm, "time", "is no time of SLURM's", f"{PREFIX}.time=24:00:00, or 1-12 for a day and a half")
    elif slurm.time is not None and (length := in_seconds(slurm.time)) <= slurm.signal_delay_s:
        reason = "the run would be asked to save before it has begun"
        yield _finding(slurm, "time signal_delay_s", reason, f"a longer time; it is {length:,} seconds now")
    if slurm.mem is not None and not _MEMORY.fullmatch(slurm.mem):
        yield _finding(slurm, "mem", "is no amount of memory", f"{PREFIX}.mem=64G, or 0 for all of a node's")
    if not _FOLDER.fullmatch(slurm.scratch) and slurm.scratch != SlurmConfig().scratch:
        remedy = f"{PREFIX}.scratch=/local/disk; variables are allowed: '{PREFIX}.scratch=\\${{TMPDIR}}'"
        yield _finding(slurm, "scratch", "is no folder of a node's by its whole path", remedy)
    for line in slurm.setup:
        if not line.strip() or not line.isprintable():
            problem = Problem(f"{PREFIX}.setup: {show(line)} is no line of shell", "one line each, without breaks")
            yield Finding((f"{PREFIX}.setup",), problem)
    for option in slurm.options:
        if found := _option(option):
            yield Finding((f"{PREFIX}.options",), Problem(f"{PREFIX}.options: {show(option)} {found[0]}", found[1]))


def check_run(slurm: SlurmConfig, config: RunConfig) -> Iterator[Finding]:
    """Find what is wrong with what is asked of SLURM for a run of `config`."""
    trainer = config.trainer
    if trainer.devices == "auto" and trainer.accelerator != "cpu":
        cause = "trainer.devices=auto: SLURM must be told how many GPUs of a node the run is to have"
        yield Finding(("trainer.devices",), Problem(cause, "trainer.devices=8, for instance"))
    if trainer.accelerator == "cpu" and slurm.gpu_type is not None:
        reason = "the run is on CPUs (trainer.accelerator=cpu)"
        yield _finding(slurm, "gpu_type", reason, f"leave {PREFIX}.gpu_type out")
    cache = config.data.cache_dir if isinstance(config.data, TextData) else None
    if slurm.copy_tokens and cache is None:
        reason = "this run has no data.cache_dir"
        remedy = "data.cache_dir=FOLDER, which `python -m gpt2_fp8.prepare` has filled; or leave it out"
        yield _finding(slurm, "copy_tokens", reason, remedy)
    elif slurm.copy_tokens and cache is not None and not Path(cache).expanduser().is_dir():
        reason = f"there is no folder {show(cache)} (data.cache_dir) to copy, for which the job would wait in vain"
        remedy = f"`python -m gpt2_fp8.prepare` with the same words fills it; or leave {PREFIX}.copy_tokens out"
        yield _finding(slurm, "copy_tokens", reason, remedy)


def tasks(config: RunConfig) -> int:
    """Return the processes of a run on each node: one a device."""
    return 1 if config.trainer.devices == "auto" else config.trainer.devices


def _option(option: str) -> tuple[str, str] | None:
    """Return why a word is no further option of sbatch, and what to type; None if it is one."""
    match = _OPTION.fullmatch(option)
    if match is None or not option.isprintable():
        return "is no option of sbatch in its long form", f'\'{PREFIX}.options=["--exclusive","--mail-type=END"]\''
    name = match[1]
    if name in OWN:
        key = name.replace("-", "_")
        own = key in SlurmConfig.__dataclass_fields__
        remedy = f"{PREFIX}.{key}=VALUE" if own else INSTEAD.get(name, "leave it out")
        return "is set by the script itself", remedy
    return None


def in_seconds(time: str) -> int:
    """Return a time of SLURM's form in seconds."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _finding(slurm: SlurmConfig, names: str, reason: str, remedy: str) -> Finding:
    return finding(slurm, names, reason, remedy, f"{PREFIX}.")
