"""A run's process: its folder's lock, the import of torch, the training, or the start of one process for each rank."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import Stopped, UserError
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import programs, ranks, registry, signals, slurm
from gpt2_fp8.train.run_end import RunEnd

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2  # the last holder may delete the file after another process opened it, before it locked it
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def train(
    config: RunConfig, folder: Path, here: Path | None = None, words: Sequence[str] = (), typed: Typed | None = None
) -> float | None:
    """Train as `config` says, in `folder`; returns the last validation loss (what a sweep compares).

    Every end of the run, from the import of torch on, leaves a `summary.json`. Raises the errors of `config.errors` for
    ends of a known kind.

    Args:
        here: where the command was typed, and plugins are searched for.
        words: the run's overrides.
        typed: its command line, of which the log makes others; None: it has none of its own, as a job of a sweep.
    """
    here = here or Path.cwd()
    with signals.handle_signals() as handlers, ExitStack() as held:
        if ranks.is_first_rank() and not config.trainer.fast_dev_run:
            held.enter_context(lock_run(folder))
            if config.ckpt_path is None and (words or typed) and (found := disk.check_untaken(folder)):
                raise UserError(found)  # since the command line was checked
        end = RunEnd(config, folder, here, words, typed)
        try:
            fit = import_training()
            registry.load(config.plugins, here)
            handlers.hold()  # a signal waits for `GracefulStop`
            loss = fit(config, end)
        except BaseException as caught:
            handlers.hold()  # only the end follows
            signum, ends = handlers.received, handlers.thrown or end.first_step is None
            if signum is not None and ends and not isinstance(caught, Stopped):  # it may have become another error
                stopped = slurm.requeue_or_stop(signum)
                end.close(stopped)
                raise stopped from None
            end.close(caught)
            raise
        end.close(None)
        return loss


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the folder of a run. Raises UserError if another run holds it, or if nothing can be written there.

    The lock is filelock's `flock` on the file `.lock`, which says who holds it and since when. The kernel releases it
    when the process dies. Over NFS, Linux extends it to the other hosts. Only rank 0's process takes it.
    """
    from filelock import FileLock, Timeout  # slow to import, and `--help` needs no lock

    path = folder / disk.LOCK
    lock = FileLock(path, _RETRY_SECONDS, poll_interval=0.02, thread_local=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        holder = disk.read_holder(folder) or f"{path} does not say which"
        raise UserError.of(f"another run is at work in {folder}: {holder}", "give this one another run_name") from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise UserError.of(f"{path}: {error.strerror}", "hydra.run.dir=FOLDER puts a run elsewhere") from None
        log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", folder, error)
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {now}\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # a file that stays locks nothing
            path.unlink(missing_ok=True)
        lock.release(force=True)


def import_training() -> Callable[[RunConfig, RunEnd], float | None]:
    """Import torch and the training program, and return `fit.run`."""
    # When a process is gone, torch warns of each connection to it by a page of its own stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    first = "gpt2_fp8.train.fit" not in sys.modules
    gc.disable()  # modules live as long as the process: without collections their import is a quarter faster
    try:
        from gpt2_fp8.train.fit import run

        if first:
            gc.freeze()
    finally:
        gc.enable()
    return run


def import_rendezvous() -> ModuleType:
    """Import torch and return `runtime.rendezvous`, for the processes that a launcher has started to meet."""
    with signals.handle_signals():
        import_training()
        from gpt2_fp8.runtime import rendezvous

        return rendezvous


def launch_ranks(config: RunConfig, end: Callable[[], RunEnd], words: Callable[[], Sequence[str]]) -> int | None:
    """Run a job as one process for each rank; returns the exit code, None if this process runs it.

    That is where a launcher has started it, or where one process is enough, which nobody starts again. `end`
    and `words` return the run's end and its command line. Raises RankLost if a rank was killed.
    """
    options = config.trainer
    alone = options.devices == 1 or (options.devices, options.accelerator) == ("auto", "cpu")
    if ranks.current().launcher or (alone and not options.max_restarts):
        return None
    from gpt2_fp8.runtime import devices  # imports torch

    if (count := devices.devices(config, devices.device(config))) == 1 and not options.max_restarts:
        return None
    with signals.handle_signals():
        from gpt2_fp8.runtime import rendezvous

    run_end = end()
    try:
        code = rendezvous.launch(count, options.max_restarts, words())
    except rendezvous.RankLost as lost:
        if run_end.in_sweep:  # which goes on, and says it at its end
            programs.say(str(lost))
        run_end.close_for_ranks(lost)
        raise
    if code > 128 and run_end.read_ranks().get("exit_code", code) != code:  # the ranks were starting again
        programs.say(str(stopped := Stopped(code - 128)))
        run_end.close_for_ranks(stopped)
    return code
