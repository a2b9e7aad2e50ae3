"""The command line of one process of a run, checked, as Hydra takes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpt2_fp8.compose import Planned, Purpose, hydras_line, planned, quoted
from gpt2_fp8.config import own_words
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import programs, ranks, slurm


def checked(argv: list[str], rendezvous: Callable[[], Any]) -> tuple[list[str], list[RunConfig]]:
    """Return a command line as Hydra takes it, and its jobs. Raises UserError with everything that is wrong with it.

    `rendezvous` imports torch and returns `runtime.rendezvous`. It is called for processes that a launcher has started,
    when their command line is checked, but for the folder: an earlier generation of processes may have made it.
    """
    place, lasting = ranks.current(), slurm.lasting_name(argv)
    if place.launcher is None:
        jobs = planned(argv, Purpose(begins=True, name=lasting))
        return _named(argv, lasting, jobs), [config for config, _ in jobs]
    jobs = planned(argv, Purpose(restarted=True, begins=True, name=lasting))
    if not place.rank:
        _say(f"{programs.VERSION}: loading torch, to meet the other ranks")
    met = rendezvous().join(place)
    if not met.again and not ranks.turns_before():
        jobs = planned(argv, Purpose(restarted=False, begins=True, name=lasting))
    words = _named(argv, lasting, jobs)
    if len(jobs) == 1:
        folder = met.folder(jobs[0][1])
        if place.rank or not own_words.keys(words) & {"run_name", "hydra.run.dir"}:
            words.append(f"hydra.run.dir={quoted(folder)}")
        if place.rank:  # rank 0 writes the log and the settings
            words += [f"hydra.job.name=rank_{place.rank}", "hydra.output_subdir=null"]
    return words, [config for config, _ in jobs]


def _named(argv: list[str], lasting: str | None, jobs: list[Planned]) -> list[str]:
    """Return a command line as Hydra takes it, and with its name, if `jobs` took it from this batch job."""
    words = hydras_line(argv)
    given = "run_name" in own_words.keys(argv)
    if given or lasting is None or not any(config.run_name == lasting for config, _ in jobs):
        return words
    if ranks.is_first_rank():
        _say(f"SLURM may start this job again: run_name={lasting}, which lasts as long as it")
    return [*words, f"run_name={lasting}"]


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
