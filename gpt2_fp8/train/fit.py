"""A run from its configuration to its summary."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from gpt2_fp8.backends.resolve import Plan, as_before, fallen_back, resolve
from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.graceful_stop import GracefulStop
from gpt2_fp8.callbacks.progress import ProgressBar
from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.load import read_plain
from gpt2_fp8.checkpoint.lock import RunLock
from gpt2_fp8.compat.lightning_logging import detach_logging
from gpt2_fp8.compat.lightning_process import rank
from gpt2_fp8.config import disk, own_words, run_length
from gpt2_fp8.config.checks import check_batch
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.config.run_length import last_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.divergence import RollBack
from gpt2_fp8.runtime import devices, ranks, rendezvous, spool
from gpt2_fp8.train import setup
from gpt2_fp8.train.build import Parts, build
from gpt2_fp8.train.context import RunContext, last_val_loss, validation_missing
from gpt2_fp8.train.length import resolve_length
from gpt2_fp8.train.process import quiet


def checkpoint_before(back: RollBack, folder: Path, saved: Collection[int], origin: Path | None) -> Path | None:
    """Return the checkpoint in `folder` to go back to, and log it; None: the run starts again.

    `saved`: the steps that this process has written there; other steps may be another run's. `origin`: the checkpoint
    that the run continued from. It counts as the run's own, and so do those before it in the same folder. If none is
    older than the divergence, the oldest one after its beginning will do, provided no update was made since.
    """
    found = pointers.steps(folder)
    before_origin = pointers.step_of(origin.name) if origin and origin.parent.resolve() == folder.resolve() else None
    own = {step: path for step, path in found.items() if step in saved or step <= (before_origin or 0)}
    candidates = [own[step] for step in sorted(own, reverse=True) if step <= back.before]
    candidates += [origin] if origin else []
    if back.weights_intact:
        candidates += [own[step] for step in sorted(own) if back.before < step <= back.step]
    path = next((path for path in candidates if is_sound(path)), None)
    where = f"to {path}" if path else "to the start, since no sound checkpoint is older than the trouble"
    log.warning("step %d: going back %s", back.step, where)
    return path


def is_finite(tensor: Tensor) -> bool:
    """Return whether each number of the tensor is finite."""
    return bool(torch.isfinite(tensor.float() if tensor.is_floating_point() else tensor).all())  # FP8 has no isfinite


def is_sound(path: Path) -> bool:
    """Return whether a checkpoint can be read, with finite weights and moments.

    A weight that is not finite shows in no loss before the next step, and may have been saved meanwhile.
    """
    try:
        checkpoint = files.read(path)
    except (files.CheckpointError, OSError):
        return False
    parts = checkpoint["state_dict"], checkpoint.get("optimizer_states", [])
    return all(is_finite(tensor) for tensor in _tensors(parts))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


log = logging.getLogger(__name__)


def run(config: RunConfig, folder: Path, words: Sequence[str] = (), typed: Typed | None = None) -> float | None:
    """Train as `config` says, in `folder`; returns the last validation loss (what a sweep compares).

    `words`: the run's overrides. A micro-batch that is among them must not change. `typed`: its command line, of
    which the log makes others; None: it has none of its own, as a job of a sweep. Writes `summary.json` at every end,
    good or bad, of what it has begun. Raises the errors of `config.errors` for ends of a known kind.
    """
    if (place := ranks.current()).launcher:
        rendezvous.join(place)
    quiet()
    locked = rank() == 0 and not config.trainer.fast_dev_run
    spool.clear()
    with RunLock(folder) if locked else nullcontext():
        if locked and config.ckpt_path is None and (words or typed is not None):
            _refuse_taken(folder)
        return _run(config, folder, words, typed)


def _refuse_taken(folder: Path) -> None:
    """Raise UserError if a folder that was free when the command line was checked holds another run by now."""
    if found := disk.check_untaken(folder):
        raise UserError(finding.problem for finding in found)


def _run(config: RunConfig, folder: Path, words: Sequence[str], line: Typed | None) -> float | None:
    context, error = RunContext(config, folder, words, line), None
    typed = own_words.keys(words)
    try:
        with GracefulStop(lambda trainer: _stop_here(trainer, context.checkpointing)) as stop:
            parts = _train(_prepare(config, folder, context, typed), folder, context, stop, words, line is None)
        return last_val_loss(parts, context.checkpointing)
    except BaseException as caught:
        met = rendezvous.joined()
        error = caught if met is None else met.explain(caught)
        if error is not caught:
            raise error from None
        raise
    finally:
        context.close(error)


class _Start(NamedTuple):
    """What a run begins with: its settings without any `auto`, what they mean here, and its checkpoint."""

    config: RunConfig
    plan: Plan
    checkpoint: Path | None
    world_size: int
    limit: str  # the key of the limit that gives the last step


def _prepare(config: RunConfig, folder: Path, context: RunContext, typed: Container[str]) -> _Start:
    """Find what the settings mean on this machine. Everything that can be refused before the build is refused here."""
    device = devices.device(config)
    world_size = devices.devices(config, device) * config.trainer.num_nodes
    before = config
    config = run_length.fit_micro_batch(config, world_size, typed)  # `trainer.devices=auto` is known only now
    for line in run_length.describe_micro_batch(before, config):
        log.info(line)
    check_batch(config, world_size)
    config, limit, epoch_ends = resolve_length(config, rank(), typed)
    context.checkpointing.intervals.kept.add(epoch_ends)
    checkpoint = setup.checkpoint(config, folder)
    config = setup.resolve_micro_batch(config, world_size, device, typed)
    if rank() == 0:
        setup.check_room(config, context.checkpointing.folder, len(epoch_ends))
    plan = _plan(config, device, checkpoint)
    context.chosen(config)
    return _Start(config, plan, checkpoint, world_size, limit)


def _train(
    start: _Start, folder: Path, context: RunContext, stop: GracefulStop, words: Sequence[str], in_sweep: bool
) -> Parts:
    """Build and fit, again after each rollback; returns the parts of the last `fit`, which has finished."""
    in_sweep = in_sweep and bool(words)
    config, plan, checkpoint, world_size, limit = start
    ends: list[Callback] = [context.checkpointing, stop]
    log_line = context.log_line(config, setup.step_of(checkpoint) or 0)
    while True:
        limit_of_time, policy = context.time_limit, context.divergence
        parts = context.built(
            build(config, plan, folder, checkpoint, limit_of_time, policy, log_line, ends, words, in_sweep)
        )
        setup.announce(config, plan, parts.module.vocab_size, world_size, folder, checkpoint)
        back = _fit(parts, checkpoint)
        if back is None:
            break
        plan, checkpoint = _go_back(back, config, parts, checkpoint, context)
        del parts  # its memory is needed
        context.rolled_back()
    _check_end(parts, context)
    if validation_missing(parts, context.checkpointing):
        parts.trainer.validate(parts.module, datamodule=parts.data, verbose=False)
    context.divergence.policy.validated(parts.trainer.global_step, last_val_loss(parts, context.checkpointing))
    context.ended(limit if parts.trainer.global_step >= last_step(config) else None)
    return parts


def _check_end(parts: Parts, context: RunContext) -> None:
    """Raise Diverged if `fit` has finished with weights that are not finite. Collective."""
    finite = all(is_finite(weight) for weight in parts.module.parameters())
    finite = parts.trainer.strategy.reduce_boolean_decision(finite, all=True)
    context.divergence.policy.end(parts.trainer.global_step, finite)


def _stop_here(trainer: Any, checkpointing: Checkpointing) -> None:
    """Save the run for a signal, which may have come in the middle of a validation."""
    checkpointing.save_now(trainer)


def _fit(parts: Parts, checkpoint: Path | None) -> RollBack | None:
    """Train to the end, or return the rollback that is needed."""
    try:
        parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=False)
    except RollBack as back:
        return back.with_traceback(None)  # the traceback holds the model
    finally:
        if isinstance(bar := parts.trainer.progress_bar_callback, ProgressBar):
            bar.stop()  # also if another callback fails before its turn
    return None


def _go_back(
    back: RollBack, config: RunConfig, parts: Parts, checkpoint: Path | None, context: RunContext
) -> tuple[Plan, Path | None]:
    """Return the plan and the checkpoint to continue with after a rollback, the same on all ranks. Collective.

    Rank 0 reads the checkpoints. `checkpoint`: what the run has continued from so far.
    """
    parts.data.teardown()
    saved = context.checkpointing.writer.written
    path = checkpoint_before(back, context.checkpointing.folder, saved, checkpoint) if rank() == 0 else None
    path = parts.trainer.strategy.broadcast(path)
    context.divergence.start_again(setup.step_of(path) or 0)
    detach_logging(parts.trainer)
    if back.step > parts.module.step.attempts.steps_in_fp8:  # it was in bf16: FP8 is not at fault
        return parts.plan, path
    return fallen_back(parts.plan, config, f"fallback at step {back.step}: {back.reason}"), path


def _plan(config: RunConfig, device: Literal["cuda", "cpu"], checkpoint: Path | None) -> Plan:
    """Return what will run. A run that has fallen back to bf16 stays there."""
    plan = resolve(config, device)
    if checkpoint is None:
        return plan
    before = as_before(plan, config, read_plain(checkpoint, "precision"))
    if before.ran != plan.ran:
        log.info(
            "the run has fallen back to bf16, and stays there; another precision=NAME than %s ends that", plan.asked
        )
    return before
