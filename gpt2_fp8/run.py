"""The run: trains a model as its settings say.

    python -m gpt2_fp8.run model=gpt2 precision=fp8_hybrid data=fineweb
    python -m gpt2_fp8.run -m precision=bf16,fp8_hybrid seed=1,2

Bad input is refused before torch is imported. Exit codes: 0 done, or requeued by SLURM; 1 any fault, 2 the input, 3
diverged, 4 data source lost, 130 stopped by SIGINT, 143 by SIGTERM, SIGHUP or SIGQUIT, 138 by SIGUSR1, 141 no reader.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_fp8.config import own_words
from gpt2_fp8.config.errors import RunError, Stopped
from gpt2_fp8.config.shown import harmless, quote
from gpt2_fp8.runtime import programs, ranks, signals, slurm
from gpt2_fp8.train import launch, sweep_job
from gpt2_fp8.train.run_end import RunEnd, end_of_process, joined_ranks, known_end, say_end

if TYPE_CHECKING:  # imported in functions, while signals are handled
    from omegaconf import DictConfig

    from gpt2_fp8.compose import PlannedJobs

log = logging.getLogger("gpt2_fp8.run")  # also as `__main__`


class _Ended(BaseException):
    """Carries an error past Hydra, which catches every Exception: a signal is to end a sweep, not one job of it."""

    def __init__(self, error: RunError):
        self.error = error


def job(cfg: DictConfig) -> float | None:
    """Run one job, of a sweep or the only one, in the folder that Hydra has made. Returns the last validation loss."""
    if not slurm.is_submitted_call():
        return _job(cfg)
    with signals.handle_signals():  # from here on, in place of submitit's handlers
        try:
            return _job(cfg)
        except _Ended as ended:  # it may be in the queue again: submitit gets no result
            programs.say(str(ended.error))
            raise SystemExit(ended.error.exit_code) from None


def _job(cfg: DictConfig) -> float | None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from gpt2_fp8 import compose
    from gpt2_fp8.compose import sweeps
    from gpt2_fp8.compose.commandline import strip_force

    try:
        folder = Path(HydraConfig.get().runtime.output_dir)
        here = Path(HydraConfig.get().runtime.cwd)  # where the command was typed
        words = strip_force(map(str, HydraConfig.get().overrides.task))
        again = ranks.turns_before() > 0 or ((met := joined_ranks()) is not None and met.again)
        config = compose.to_run_config(cfg, own_words.keys(words), folder if again else None)
        if ranks.turns_before() and config.ckpt_path == "last" != cfg.ckpt_path and ranks.is_first_rank():
            log.info("SLURM has started this job again: it continues as by ckpt_path=last")
        if HydraConfig.get().mode == RunMode.MULTIRUN and sweeps.is_joblib(HydraConfig.get()):
            return sweep_job.run(config, folder, here, words, here / HydraConfig.get().sweep.dir / sweeps.STOP)
        alone = HydraConfig.get().mode == RunMode.RUN
        if not alone:
            end = partial(RunEnd, config, folder, here, words)
            code = launch.launch_ranks(config, end, lambda: compose.of_job(sys.argv[1:], words, str(folder)))
            if code is not None and code > 128:
                raise Stopped(code - 128)
            if code is not None:
                return end_of_process(end(), code)
        if "torch" not in sys.modules and ranks.is_first_rank():
            log.info("%s: loading torch, some seconds", programs.VERSION)  # a screen that stays empty looks like a hang
        typed = own_words.Typed(tuple(strip_force(sys.argv[1:])), here) if alone else None
        return launch.train(config, folder, here, words, typed)
    except RunError as error:
        if isinstance(error, Stopped) or HydraConfig.get().mode == RunMode.RUN:
            raise _Ended(error) from error
        raise  # to Hydra, which says what job it was, runs the others, and raises the first


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code.

    It ends the process where one of several ranks fails without the others.
    """
    if programs.asks_version(argv):
        if ranks.is_first_rank():
            print(programs.VERSION)
        return 0
    with signals.handle_signals() as handlers:
        ranks.forget()
        try:
            with handlers.at_once():
                code = _run(argv)
            if handlers.thrown:  # its exception was lost in a section that blocks signals
                handlers.throw()
        except BaseException as caught:
            if isinstance(caught, BrokenPipeError) and "torch" not in sys.modules:
                return programs.without_reader()  # of a help text, or of what is said before a run
            error = known_end(caught.error if isinstance(caught, _Ended) else caught, handlers)
            if error is None and not isinstance(caught, Exception):
                raise  # SystemExit, of Hydra's own answers
            handlers.ends = True
            code = say_end(error)
            if (met := joined_ranks()) is not None and met.apart is not None:
                atexit._run_exitfuncs()
                os._exit(programs.end(code))  # what else Python does, and NCCL, may wait for the GPU
    return code


def _run(argv: list[str]) -> int:
    """Run a command line; returns the exit code, or raises an error."""
    import hydra

    from gpt2_fp8 import compose
    from gpt2_fp8.compose import sweeps

    line = compose.read(argv)
    if line.shows:
        if not ranks.is_first_rank():
            return 0
        if line.shows == "help":
            print(compose.help_text(line))
            return 0
        if line.shows == "shell_completion":
            from gpt2_fp8.compose import completion

            print(completion.answer(line))
            return 0
        argv = compose.look_only(line)
    else:
        plan = compose.plan_run(line, slurm.lasting_name(argv), launch.import_rendezvous)
        argv = plan.words
        if not plan.multirun and (code := _launch_run(plan)) is not None:
            return code
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to here; Hydra would print them and exit 1
    sys.argv[1:] = argv
    try:
        hydra.main(version_base="1.3", config_path=str(compose.conf_dir()), config_name="config")(job)()
    except (Exception, KeyboardInterrupt) as error:
        if (signum := signals.get_received()) is not None and sweeps.begun() is not None:
            slurm.note_step()  # its jobs may have
            raise slurm.requeue_or_stop(signum) from None  # its jobs, and perhaps joblib, have ended for it
        if isinstance(error, Exception) and (folder := sweeps.begun()) is not None:
            sweeps.wait_for_jobs(folder)  # the table is to have every job
        raise
    finally:
        _end_sweep()
    return 0


def _launch_run(plan: PlannedJobs) -> int | None:
    """Run the only job of a plan as several ranks, in one folder; returns the exit code, None if it has one process."""
    (config, folder), here = plan.jobs[0], Path.cwd()
    assert folder is not None  # only what is shown has none
    named = own_words.keys(plan.words) & {"run_name", "hydra.run.dir"}
    words = plan.words if named else [*plan.words, f"hydra.run.dir={quote(folder)}"]
    end = partial(RunEnd, config, here / folder, here, plan.words, own_words.Typed(tuple(words), here))
    return launch.launch_ranks(config, end, lambda: words)


def _end_sweep() -> None:
    """Print and write the table of the sweep that has ended, well or not, if there was one. Raises no error."""
    from gpt2_fp8.compose import sweeps

    folder = sweeps.take()
    if folder is None or not ranks.is_first_rank():
        return
    from gpt2_fp8.reports import sweep

    try:
        for text in sweep.write(folder, sweep.read(folder)):
            print(harmless(text), flush=True)
    except OSError as error:  # a full disk, or a terminal that is gone
        programs.say(f"warning: the table of the sweep is not complete: {error}")


def entry() -> None:
    """Run the `gpt2-fp8` command."""
    programs.begin()
    programs.ignore_at_the_end()
    code = main(sys.argv[1:])
    programs.leave_with(code)
    sys.exit(programs.end(code))


if __name__ == "__main__":
    entry()
