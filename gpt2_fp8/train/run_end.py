"""The end of a run, as `summary.json`, the log's last lines, the terminal and other ranks are told of it."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_fp8.checkpoint import durable, pointers
from gpt2_fp8.config import disk, hf_config, own_words, run_length
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.errors import JobError, RunError, Stopped, UserError
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.config.schema import PlainPrecisionConfig, RunConfig
from gpt2_fp8.config.shown import as_typed, duration, format_count, harmless
from gpt2_fp8.runtime import programs, ranks, signals, slurm
from gpt2_fp8.runtime.programs import read_versions

if TYPE_CHECKING:
    from gpt2_fp8.runtime.rendezvous import Meeting

log = logging.getLogger(__name__)

AGENT_SECONDS = 5.0  # in which the agent of a refused rank 0, or srun --kill-on-bad-exit, ends the others
_STATUS = {2: "refused", 130: "stopped", 143: "stopped"}  # of a process that has ended before its run began
NAME = "summary.json"


@dataclass(kw_only=True)
class Summary:
    """A run, as `summary.json` describes it. The run fills it as it goes; `finish` and `write` end it.

    Until `finish` is called its status is "failed", so that a summary of an unexpected end never reads as success.
    """

    tags: dict[str, Any] = field(default_factory=dict)  # from `+tags.KEY=VALUE`
    notes: str | None = None
    precision: dict[str, Any]  # asked; ran; the reason if the two differ; last_in_bf16, steps before the end
    recipe: str | None = None  # the scaling recipe; None if nothing ran in FP8
    optimizer: str = "adamw"
    status: str = "failed"  # completed, stopped, failed, diverged, refused, data_lost, interrupted
    exit_code: int = 1
    message: str = ""
    ended_by: str | None = None  # the key of the limit that ended it: trainer.max_steps, ...; None: something else did
    started: str = field(default_factory=lambda: _now())
    ended: str | None = None
    duration_s: float | None = None
    steps: int = 0  # optimizer steps of the whole run, including those before a resume
    tokens: int = 0  # of these steps
    last_train_loss: float | None = None
    last_val_loss: float | None = None
    best_val_loss: float | None = None
    best_val_loss_step: int | None = None
    tokens_per_second: float | None = None  # the median over this process's steps
    peak_memory_gb: float | None = None  # allocated on the GPU; on a CPU resident of the process
    training_memory_gb: float | None = None  # the GPU's peaks of training and validation, separately
    validation_memory_gb: float | None = None
    checkpoint_stall_seconds: float | None = None  # the longest of this process; None if no checkpoint was taken
    skipped_steps: int = 0
    divergence: dict[str, Any] = field(  # what went wrong in steps of the whole run, and what was done
        default_factory=lambda: {"events": [], "reruns": 0, "skipped": 0, "rollbacks": 0}
    )
    checkpoint: dict[str, str | None] = field(default_factory=lambda: {"last": None, "best": None})  # paths
    data: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)  # the layers, and the kernels of the fused ones by part
    overrides: list[str] = field(default_factory=list)  # the words of this run or of its job in a sweep
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration, as plain values
    versions: dict[str, str | None] = field(default_factory=read_versions)
    device: str | None = None
    command: list[str] = field(default_factory=lambda: list(sys.argv))

    def __post_init__(self) -> None:
        self._began = time.monotonic()  # the wall clock may be set back meanwhile

    def take_settings(self, config: RunConfig) -> None:
        """Note the final settings."""
        self.recipe = None if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name
        self.optimizer, self.config = config.optimizer.name, asdict(config)

    def finish(self, error: BaseException | None = None) -> int:
        """Note how the run ended: `error`, or None if it ended well. Returns the process's exit code."""
        self.ended, self.duration_s = _now(), time.monotonic() - self._began
        end: tuple[str, int, str] = "failed", 1, f"{type(error).__name__}: {error}"
        if error is None:
            end = "completed", 0, ""
        elif isinstance(error, RunError):
            end = error.status, error.exit_code, str(error)
        elif isinstance(error, KeyboardInterrupt):
            end = "interrupted", 130, "interrupted before it could save"
        self.status, self.exit_code, self.message = end
        return self.exit_code

    def write(self, folder: Path) -> Path:
        """Replace `folder/summary.json` atomically and return its path; non-finite floats become null.

        What a process without a step cannot know stays as it is there. Raises OSError.
        """
        if self.tokens_per_second is None:
            before = read_summary(folder)
            for name in ("tokens_per_second", "checkpoint_stall_seconds", "last_train_loss"):
                setattr(self, name, getattr(self, name) or before.get(name))
        durable.write_json(folder / NAME, durable.replace_nonfinite(asdict(self)))
        return folder / NAME


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary in a run's folder, as plain values; empty if there is none that can be read."""
    with suppress(OSError, ValueError):
        return dict(disk.read_json(folder / NAME))
    return {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunEnd:
    """What the end of a run in `folder` tells. The run fills `summary` as it goes.

    `words` are the run's overrides; `first_step` is the step that training continues from, None before training.
    """

    def __init__(
        self, config: RunConfig, folder: Path, here: Path, words: Sequence[str] = (), typed: Typed | None = None
    ) -> None:
        self.folder, self.words = folder, words
        precision = {"asked": config.precision.name, "ran": None, "reason": None, "last_in_bf16": 0}
        self.summary = Summary(precision=precision, tags=config.tags, notes=config.notes, overrides=list(words))
        self.summary.take_settings(config)
        self.first_step: int | None = None
        self.in_sweep = typed is None and bool(words)
        self.config, self._here, self._typed = config, here, typed

    def outdate(self, step: int, _: object) -> None:
        """Remove the summary of a process before, once this one has trained: a kill leaves none, as of a new run."""
        if step == (self.first_step or 0) + 1 and ranks.is_first_rank():
            with suppress(OSError):
                (self.folder / NAME).unlink()

    def close(self, error: BaseException | None) -> None:
        """Write the summary and the last lines of the log, on rank 0. `error` has ended the run; None: it ended well.

        A refusal does not replace the summary of a run that has saved something.
        """
        saved = bool(pointers.steps(self.folder / "checkpoints"))
        if isinstance(error, RunError):
            error.tell(own_words.going_on(self.folder, self._here, saved, self.in_sweep))
        self.summary.finish(error)
        if isinstance(error, RunError) and ranks.is_first_rank():
            _log_to_file(str(error))  # the terminal has it from `say_end`
        refused = isinstance(error, UserError) and self.summary.steps <= (self.first_step or 0)
        if not ranks.is_first_rank() or (refused and saved):
            return
        try:
            self.summary.write(self.folder)
        except OSError as failure:  # a full disk: the run's end and exit code stay what they are
            log.error("%s; the summary cannot be written: %s", self.summary.status, failure)
            return
        for line in self._last_lines() if self.first_step is not None else ():
            log.info(line)

    def close_for_ranks(self, error: RunError) -> None:
        """Have the summary tell how the ranks have ended: rank 0 may not have known, or may have been killed."""
        saved = pointers.steps(self.folder / "checkpoints")
        if found := self.read_ranks():
            error.tell(own_words.going_on(self.folder, self._here, bool(saved), self.in_sweep))
            told = {"status": error.status, "exit_code": error.exit_code, "message": str(error), "ended": _now()}
            with suppress(OSError):  # a full disk
                durable.write_json(self.folder / NAME, found | told)
        else:
            self.summary.steps = max(saved, default=0)
            self.close(error)

    def read_ranks(self) -> dict[str, Any]:
        """Return the summary that the ranks of this run have written; {} without one, or if it is of a run before."""
        found = read_summary(self.folder)
        return found if str(found.get("started", "")) >= self.summary.started else {}

    def _last_lines(self) -> Iterator[str]:
        """Yield the last lines of the log: results, where the curves are, and what to type next."""
        done, config, first_step = self.summary, self.config, self.first_step or 0
        yield result_line(done, first_step)
        here = self._typed.here if self._typed else None
        shown = shlex.quote(str(as_typed(self.folder, here)))
        yield f"summary: {as_typed(self.folder / NAME, here)}"
        nothing = done.steps == first_step and done.status != "completed"
        if nothing or config.trainer.fast_dev_run:
            return
        if config.logger.tensorboard:
            yield f"curves: tensorboard --logdir {shown}"
        if self._typed is None or done.checkpoint["last"] is None:
            return
        yield f"next: {self._command_to_continue(self._typed)}"
        if done.status != "completed":
            return
        spec = block_spec(config.model)
        if any(not hf_config.misfits(spec, architecture) for architecture in hf_config.ARCHITECTURES):
            yield f"next: python -m gpt2_fp8.export {shown} exported"
        yield f'next: python -m gpt2_fp8.generate {shown} prompt="Once upon a time"'

    def _command_to_continue(self, typed: Typed) -> str:
        """Return the command that continues the run, for as long again if it has completed."""
        done = self.summary
        completed = done.status == "completed"
        longer = own_words.twice_as_long(self.config, done.ended_by, done.steps) if completed else []
        started = ranks.current()
        if started.several and started.launcher != ranks.OWN:  # `python` alone would go on in a single process
            line = "line" if started.launcher == ranks.VARIABLES else f"line of {started.launcher}"
            return f"the same {line}, with {own_words.resume_words(typed, self.folder, longer)}"
        return own_words.continue_command(typed, self.folder, longer)


def _log_to_file(text: str) -> None:
    """Write what has ended a run into its log file alone."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, harmless(text), (), None))


def result_line(done: Summary, first_step: int) -> str:
    """Return a run's results in one line: steps, time, losses in nats a token, speed of all GPUs together."""
    steps, took = format_count(done.steps, "step"), duration(done.duration_s or 0.0)
    steps += f", {done.steps - first_step:,} of them in {took}" if first_step else f" in {took}"
    best = "" if done.best_val_loss is None else f" (best {done.best_val_loss:.4f} at step {done.best_val_loss_step:,})"
    known = (
        ("train loss {:.4f}", done.last_train_loss),
        ("validation {:.4f}" + best, done.last_val_loss),
        ("{:,.0f} tok/s", done.tokens_per_second),
    )
    found = [shown.format(value) for shown, value in known if value is not None]
    steps += f", ended by {done.ended_by}" if done.ended_by in run_length.EARLY else ""
    return f"{done.status} {steps}: {', '.join(found)}" if found else f"{done.status}: {steps}"


def joined_ranks() -> Meeting | None:
    """Return where the ranks have met; None: there is one process, or they have not."""
    if "gpt2_fp8.runtime.rendezvous" not in sys.modules:  # it imports torch
        return None
    from gpt2_fp8.runtime import rendezvous

    return rendezvous.get_meeting()


def known_end(caught: BaseException, handlers: signals.Signals) -> RunError | None:
    """Return the known end that `caught` is, or None.

    After a signal was thrown, the end is the signal's: it may have caused other errors by what it left half done.
    """
    if handlers.thrown and not isinstance(caught, Stopped):  # before there was a run, or after it
        assert handlers.received is not None
        return slurm.requeue_or_stop(handlers.received)
    return caught if isinstance(caught, RunError) else None


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
    elif os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_STEP_ID"):
        until = time.monotonic() + AGENT_SECONDS
        while signals.get_received() is None and time.monotonic() < until:
            time.sleep(0.1)
        if signals.get_received() is None:  # rank 0 was not refused
            programs.say(f"rank {os.environ.get('RANK') or os.environ.get('SLURM_PROCID')}: {text}")
    return 1 if error is None else error.exit_code


def end_of_process(end: RunEnd, code: int) -> float | None:
    """Return the last validation loss of a run in another process, which has ended with `code`, or raise JobError.

    A process that has written no summary, as a killed one, gets one.
    """
    found = read_summary(end.folder)
    if code == 0:
        return found.get("last_val_loss")
    if found.get("exit_code") == code:
        raise JobError(found["status"], code, found["message"])
    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
    error = JobError(_STATUS.get(code, "failed"), max(code, 1), killed or f"ended with exit code {code}")
    if killed or not found:
        end.close(error)
    raise error
