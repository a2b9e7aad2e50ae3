"""The end of a run, as `summary.json`, the log's last lines and the terminal tell it."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config import hf_config, own_words
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.errors import JobError, RunError, UserError
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import as_typed, counted, duration, setting
from gpt2_fp8.runtime import programs, ranks, signals
from gpt2_fp8.train import summary
from gpt2_fp8.train.summary import Summary

if TYPE_CHECKING:
    from gpt2_fp8.runtime.rendezvous import Meeting

log = logging.getLogger(__name__)
AGENT_SECONDS = 5.0  # in which the agent of a refused rank 0 ends the others
_STATUS = {2: "refused", 130: "stopped", 143: "stopped"}  # of a process that has ended before its run began


class RunEnd:
    """What the end of a run in `folder` tells.

    Attributes:
        summary: filled by the run as it goes.
        words: the run's overrides.
        first_step: the step that training has continued from; None before training.
    """

    def __init__(
        self, config: RunConfig, folder: Path, here: Path, words: Sequence[str] = (), typed: Typed | None = None
    ) -> None:
        self.folder, self.words = folder, words
        self.summary = Summary.of(config, words)
        self.first_step: int | None = None
        self.in_sweep = typed is None and bool(words)
        self._config, self._here, self._typed = config, here, typed

    def close(self, error: BaseException | None) -> None:
        """Write the summary and the last lines of the log, on rank 0. `error` has ended the run; None: it ended well.

        A refusal does not replace the summary of a run that has saved something.
        """
        saved = bool(pointers.steps(self.folder / "checkpoints"))
        if isinstance(error, RunError):
            error.tell(own_words.going_on(self.folder, self._here, saved, self.in_sweep))
        self.summary.finish(error)
        refused = isinstance(error, UserError) and self.summary.steps <= (self.first_step or 0)
        if not ranks.is_first_rank() or (refused and saved):
            return
        self.summary.take_over(self.folder)
        try:
            self.summary.write(self.folder)
        except OSError as failure:  # a full disk: the run's end and exit code stay what they are
            log.error("%s; the summary cannot be written: %s", self.summary.status, failure)
            return
        for line in self._last_lines() if self.first_step is not None else ():
            log.info(line)

    def _last_lines(self) -> Iterator[str]:
        """Yield the last lines of the log: results, where the curves are, and what to type next."""
        done, config, first_step = self.summary, self._config, self.first_step or 0
        yield result_line(done, first_step)
        here = self._typed.here if self._typed else None
        shown = shlex.quote(str(as_typed(self.folder, here)))
        yield f"summary: {as_typed(self.folder / summary.NAME, here)}"
        nothing = done.steps == first_step and done.status != "completed"
        if nothing or config.trainer.fast_dev_run:
            return
        if config.logger.tensorboard:
            yield f"curves: tensorboard --logdir {shown}"
        if self._typed is None or done.checkpoint.last is None:
            return
        yield f"next: {self._command_to_continue(self._typed)}"
        if done.status != "completed":
            return
        spec = block_spec(config.model)
        if any(not hf_config.misfits(spec, architecture) for architecture in hf_config.ARCHITECTURES):
            yield f"next: python -m gpt2_fp8.export {shown} exported"
        from_it = shlex.quote(setting("ckpt_path", str(as_typed(self.folder, here))))
        yield f'next: python -m gpt2_fp8.generate {from_it} prompt="Once upon a time"'

    def _command_to_continue(self, typed: Typed) -> str:
        """Return the command that continues the run, for as long again if it has completed."""
        done = self.summary
        completed = done.status == "completed"
        longer = own_words.twice_as_long(self._config, done.ended_by, done.steps) if completed else []
        started = ranks.current()
        if started.several and started.launcher != ranks.OWN:  # `python` alone would go on in a single process
            line = "line" if started.launcher == ranks.VARIABLES else f"line of {started.launcher}"
            return f"the same {line}, with {own_words.added(typed, self.folder, longer)}"
        return own_words.continued(typed, self.folder, longer)


def result_line(done: Summary, first_step: int) -> str:
    """Return a run's results in one line: steps, time, losses in nats a token, speed of all GPUs together."""
    steps, now = counted(done.steps, "step"), done.steps - first_step
    took = duration(done.duration_s or 0.0)
    steps += f", {now:,} of them in {took}" if first_step else f" in {took}"
    found = []
    if done.last_train_loss is not None:
        found.append(f"train loss {done.last_train_loss:.4f}")
    if done.last_val_loss is not None:
        best = ""
        if done.best_val_loss is not None:
            best = f" (best {done.best_val_loss:.4f} at step {done.best_val_loss_step:,})"
        found.append(f"validation {done.last_val_loss:.4f}{best}")
    if done.tokens_per_second is not None:
        found.append(f"{done.tokens_per_second:,.0f} tok/s")
    return f"{done.status} {steps}: {', '.join(found)}" if found else f"{done.status}: {steps}"


def end_of_process(end: RunEnd, code: int) -> float | None:
    """Return the last validation loss of a run that has ended in another process with exit code `code`.

    Raises JobError if it has not completed. A process that has written no summary, as a killed one, gets one.
    """
    found = summary.read(end.folder)
    if code == 0:
        return found.get("last_val_loss")
    if found.get("exit_code") == code:
        raise JobError(found["status"], code, found["message"])
    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
    error = JobError(_STATUS.get(code, "failed"), max(code, 1), killed or f"ended with exit code {code}")
    if killed or not found:
        end.close(error)
    raise error


def joined_ranks() -> Meeting | None:
    """Return where the ranks have met; None: there is one process, or they have not."""
    if "gpt2_fp8.runtime.rendezvous" not in sys.modules:  # it imports torch
        return None
    from gpt2_fp8.runtime import rendezvous

    return rendezvous.joined()


def say_end(error: RunError | None) -> int:
    """Print how the run has ended: `error`, or None for what nobody expected and is being handled; the exit code.

    Of several ranks rank 0 prints it, and a rank that failed for itself. The others wait until rank 0 has come to its
    end: an agent ends all when the first of them is gone.
    """
    met = joined_ranks()
    text = traceback.format_exc().rstrip("\n") if error is None else str(error)
    if met is not None:
        met.tell(error or RunError(text.splitlines()[-1]))
    if ranks.is_first_rank():
        programs.say(text)
        if met is not None:
            met.say(text)
    elif met is not None:
        met.end_after_rank_zero(error, text)
    elif os.environ.get("TORCHELASTIC_RUN_ID"):
        until = time.monotonic() + AGENT_SECONDS
        while signals.received() is None and time.monotonic() < until:
            time.sleep(0.1)
        if signals.received() is None:  # rank 0 was not refused
            programs.say(f"rank {os.environ.get('RANK')}: {text}")
    return 1 if error is None else error.exit_code
