"""What the log says when a run has ended: its results, where its curves are, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config import hf_config, own_words
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.config.schema import ModelConfig, RunConfig
from gpt2_fp8.config.shown import as_typed, counted, duration, setting
from gpt2_fp8.runtime import programs, ranks
from gpt2_fp8.runtime.ranks import OWN, VARIABLES
from gpt2_fp8.train.summary import Summary


def lines(summary: Summary, config: RunConfig, folder: Path, typed: Typed | None, first_step: int = 0) -> Iterator[str]:
    """Yield the last lines of a run in `folder`.

    Args:
        summary: of a run that has ended in any way.
        config: as it was composed, before its limits came to steps.
        folder: the run's.
        typed: its command line; None: it has none of its own, as a job of a sweep.
        first_step: the step that it has continued from; 0: it has begun.
    """
    yield result(summary, first_step)
    here = typed.here if typed else None
    shown = shlex.quote(str(as_typed(folder, here)))
    yield f"summary: {as_typed(folder / 'summary.json', here)}"
    if summary.steps == first_step and summary.status != "completed":
        return  # there is nothing to look at
    if config.trainer.fast_dev_run:
        return  # it has left nothing
    if config.logger.tensorboard:
        yield f"curves: tensorboard --logdir {shown}"
    if typed is not None and summary.checkpoint.last is not None:
        yield from (f"next: {command}" for command in _commands(summary, config, folder, typed, shown))


def result(summary: Summary, first_step: int) -> str:
    """Return a run's results in one line: steps, time, losses in nats a token, speed of all GPUs together."""
    done, now = counted(summary.steps, "step"), summary.steps - first_step
    took = duration(summary.duration_s or 0.0)
    done += f", {now:,} of them in {took}" if first_step else f" in {took}"
    found = []
    if summary.last_train_loss is not None:
        found.append(f"train loss {summary.last_train_loss:.4f}")
    if summary.last_val_loss is not None:
        best = ""
        if summary.best_val_loss is not None:
            best = f" (best {summary.best_val_loss:.4f} at step {summary.best_val_loss_step:,})"
        found.append(f"validation {summary.last_val_loss:.4f}{best}")
    if summary.tokens_per_second is not None:
        found.append(f"{summary.tokens_per_second:,.0f} tok/s")
    return f"{summary.status}: {done}" if not found else f"{summary.status} {done}: {', '.join(found)}"


def _commands(summary: Summary, config: RunConfig, folder: Path, typed: Typed, shown: str) -> Iterator[str]:
    """Yield what to type next: to go on, and with the programs that exist what can be made of a checkpoint."""
    completed = summary.status == "completed"
    longer = own_words.twice_as_long(config, summary.ended_by, summary.steps) if completed else []
    started = ranks.current()
    if started.several and started.launcher != OWN:  # `python` alone would go on in a single process
        line = "line" if started.launcher == VARIABLES else f"line of {started.launcher}"
        yield f"the same {line}, with {own_words.added(typed, folder, longer)}"
    else:
        yield own_words.continued(typed, folder, longer)
    if not completed:
        return
    there = programs.names()
    if "export" in there and _is_exported(config.model):
        yield f"python -m gpt2_fp8.export {shown} exported"
    if "generate" in there:
        from_it = shlex.quote(setting("ckpt_path", str(as_typed(folder, typed.here))))
        yield f'python -m gpt2_fp8.generate {from_it} prompt="Once upon a time"'


def _is_exported(model: ModelConfig) -> bool:
    """Return whether a class of Hugging Face's computes the model."""
    spec = block_spec(model)
    return any(not hf_config.misfits(spec, architecture) for architecture in hf_config.ARCHITECTURES)
