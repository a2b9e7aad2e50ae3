"""The run: trains a model as its settings say.

    python -m gpt2_fp8.run model=gpt2 precision=fp8_hybrid data=fineweb
    python -m gpt2_fp8.run -m precision=bf16,fp8_hybrid seed=1,2

Bad input is refused before torch is imported. Exit codes: 0 done, 1 any fault, 2 the input, 3 diverged, 4 data source
lost, 130 stopped by SIGINT, 143 by SIGTERM, SIGHUP or SIGQUIT.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_fp8.config import own_words
from gpt2_fp8.config.errors import RunError, Stopped, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import launched, output, process_end, programs, signals, slurm
from gpt2_fp8.train import loading

if TYPE_CHECKING:  # imported in functions, while signals are handled
    from omegaconf import DictConfig

log = logging.getLogger("gpt2_fp8.run")  # also as `__main__`
RANK_ZERO_SECONDS = 15.0  # seconds that another rank's process waits for rank 0 to end
AFTER_SIGNAL_SECONDS = 2.0  # the same after a signal, which rank 0 may not have got
_AFTER_RANK_ZERO = 10.0  # and in which it is to end when rank 0 is gone


class _Ended(BaseException):
    """Carries an error past Hydra, which catches every Exception: a signal is to end a sweep, not one job of it."""

    def __init__(self, error: RunError):
        self.error = error


def job(cfg: DictConfig) -> float | None:
    """Run one job, of a sweep or the only one, in the folder that Hydra has made. Returns the last validation loss."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from gpt2_fp8 import compose

    try:
        folder = Path(HydraConfig.get().runtime.output_dir)
        here = Path(HydraConfig.get().runtime.cwd)  # where the command was typed; `hydra.job.chdir` leaves it
        words = [str(word) for word in HydraConfig.get().overrides.task]
        config = compose.to_run_config(cfg, here if HydraConfig.get().job.chdir else None, own_words.keys(words))
        if "torch" not in sys.modules and launched.is_first_rank():
            output.forgive_outputs()
            log.info("%s: loading torch, some seconds", programs.VERSION)  # a screen that stays empty looks like a hang
        typed = own_words.Typed(tuple(sys.argv[1:]), here) if HydraConfig.get().mode == RunMode.RUN else None
        return loading.training(config, folder, here, words, typed is None)(config, folder, words, typed)
    except RunError as error:
        if isinstance(error, Stopped) or HydraConfig.get().mode == RunMode.RUN:
            raise _Ended(error) from error
        raise  # to Hydra, which says what job it was, runs the others, and raises the first


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    if programs.asks_version(argv):
        print(programs.VERSION)
        return 0
    with signals.handled() as handlers:
        rank_zero = os.getppid() if _is_launched(argv) else None
        try:
            if rank_zero is not None:
                threading.Thread(target=_end_after_rank_zero, args=(rank_zero,), daemon=True).start()
            with handlers.at_once():
                _run(argv)
            if handlers.thrown:  # its exception was lost in a section that blocks signals
                handlers.throw()
        except BaseException as caught:
            error = _run_error(caught, handlers)
            if error is None and not isinstance(caught, Exception):
                raise  # SystemExit, of Hydra's own answers
            return _end(error, rank_zero)
    return 0


def _end(error: RunError | None, rank_zero: int | None) -> int:
    """Say how the run has ended, `error`, or None for what nobody expected and is being handled; the exit code."""
    if error is None:
        _say(traceback.format_exc().rstrip("\n"))
    stopped = isinstance(error, Stopped)
    ended = _rank_zero_ends(rank_zero, AFTER_SIGNAL_SECONDS if stopped else RANK_ZERO_SECONDS)
    told = ended or (stopped and rank_zero is not None)  # by rank 0, which ends as this one did, if only later
    if error is not None and not told:
        _say(str(error))
    return 1 if error is None else error.exit_code


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that is gone
        print(harmless(text), file=sys.stderr, flush=True)


def _run(argv: list[str]) -> None:
    import hydra

    from gpt2_fp8 import compose

    if compose.is_help(argv):
        argv = compose.look_only(argv)
    else:
        compose.preflight(argv)
        argv = compose.flags_first(argv)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to here; Hydra would print them and exit 1
    sys.argv[1:] = argv
    try:
        hydra.main(version_base="1.3", config_path=str(compose.conf_dir()), config_name="config")(job)()
    finally:
        _end_sweep()


def _end_sweep() -> None:
    """Print and write the table of the sweep that has ended, well or not, if there was one. Raises no error."""
    from gpt2_fp8.compose import sweep_start

    folder = sweep_start.take()
    if folder is None or not launched.is_first_rank():
        return
    from gpt2_fp8.reports import sweep_jobs, sweep_record

    try:
        for text in sweep_record.write(folder, sweep_jobs.read(folder)):
            print(harmless(text), flush=True)
    except OSError as error:  # a full disk, or a terminal that is gone
        _say(f"warning: the table of the sweep is not complete: {error}")


def _run_error(caught: BaseException, handlers: signals.Signals) -> RunError | None:
    """Return the known end that `caught` is, or None.

    After a signal was thrown, the end is the signal's: it may have caused other errors by what it left half done.
    """
    if isinstance(caught, _Ended):
        caught = caught.error
    if handlers.thrown and not isinstance(caught, Stopped):  # before there was a run, or after it
        assert handlers.received is not None
        return slurm.ended(handlers.received)
    if isinstance(caught, RunError):
        return caught
    return _unwritable(caught) if isinstance(caught, Exception) else None


def _unwritable(error: Exception) -> UserError | None:
    """Return the error of what Hydra could not write before a job began: its settings, or the log file.

    Returns None for any other error.
    """
    cause = error.__cause__ if isinstance(error, ValueError) else error  # `logging` has it in a ValueError
    ours = any(frame.f_code is job.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))
    if ours or not isinstance(cause, OSError) or isinstance(cause, BrokenPipeError):  # the terminal's
        return None
    return UserError.of(
        f"{cause.filename or 'the settings in the folder of the run'} cannot be written: {cause.strerror or cause}",
        "free space there, lift a limit (ulimit -f), or choose another folder: hydra.run.dir=FOLDER",
    )


def _is_launched(argv: list[str]) -> bool:
    """Whether Lightning has started this process, for another rank than 0: it says so in both places."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return rank != "0" and f"hydra.job.name=train_ddp_process_{rank}" in argv


def _end_after_rank_zero(rank_zero: int) -> None:
    """Leave no process behind where rank 0 was killed before the ranks had met (then: `callbacks/rank_watchdog.py`)."""
    while os.getppid() == rank_zero:
        time.sleep(0.5)
    time.sleep(_AFTER_RANK_ZERO)
    os._exit(1)


def _rank_zero_ends(rank_zero: int | None, patience: float) -> bool:
    """In a process that Lightning started for another rank, wait for rank 0 to end; whether it did.

    Where all ranks end alike, rank 0 is to write the summary, to say why, and to return the exit code.
    """
    until = time.monotonic() + patience
    while os.getppid() == rank_zero and time.monotonic() < until:
        time.sleep(0.1)
    return rank_zero is not None and os.getppid() != rank_zero


def entry() -> None:
    """Run the `gpt2-fp8` command."""
    output.begin()
    process_end.ignore_at_the_end()
    code = main(sys.argv[1:])
    process_end.leave_with(code)
    output.end()
    sys.exit(code)


if __name__ == "__main__":
    entry()
