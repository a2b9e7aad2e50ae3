"""The command line of one process of a run, checked, as Hydra takes it.

The processes that a launcher has started meet for the check. So all of them write into rank 0's folder, or all of them
refuse the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpt2_fp8.compose import Planned, Purpose, hydras_line, planned, quoted
from gpt2_fp8.config import own_words
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.runtime import launcher, programs, slurm


def checked(argv: list[str], gathering: Callable[[], Any]) -> list[str]:
    """Return a command line as Hydra takes it. Raises UserError with everything that is wrong with it.

    `gathering` imports torch and returns `train.gathering`. It is called only for processes that must meet.
    """
    started, lasting = launcher.of_run(), slurm.lasting_name(argv)
    if not started.meets:
        return _named(argv, lasting, planned(argv, Purpose(begins=True, name=lasting)))
    if not started.rank:
        _say(f"{programs.VERSION}: loading torch, to meet the other ranks")
    ranks = gathering()
    met = ranks.join(started)
    jobs: list[Planned] = []
    problems: list[Problem] = []
    try:
        jobs = planned(argv, Purpose(restarted=met.launcher.again, begins=True, name=lasting))
    except UserError as error:
        problems = error.problems
    if len(jobs) > 1:  # a sweep of the only process
        return _named(argv, lasting, jobs)
    config, own = jobs[0] if jobs else (None, None)
    folder = ranks.agree(met, config, own, problems)
    words = _named(argv, lasting, jobs)
    if started.rank or not own_words.keys(words) & {"run_name", "hydra.run.dir"}:
        words.append(f"hydra.run.dir={quoted(str(folder))}")
    if started.rank:  # rank 0 writes the log and the settings
        words += [f"hydra.job.name=rank_{started.rank}", "hydra.output_subdir=null"]
    return words


def _named(argv: list[str], lasting: str | None, jobs: list[Planned]) -> list[str]:
    """Return a command line as Hydra takes it, and with its name, if `jobs` took it from this batch job."""
    words = hydras_line(argv)
    given = "run_name" in own_words.keys(argv)  # by Lightning's launcher too, to the ranks that it starts
    if given or lasting is None or not any(config.run_name == lasting for config, _ in jobs):
        return words
    if launcher.is_first_rank():
        _say(f"SLURM may start this job again: run_name={lasting}, which lasts as long as it")
    return [*words, f"run_name={lasting}"]


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
