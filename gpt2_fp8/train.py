"""A run from its configuration to its summary."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from gpt2_fp8 import startup
from gpt2_fp8.build import Parts, build
from gpt2_fp8.callbacks.fallback import Fallback
from gpt2_fp8.callbacks.graceful_stop import GracefulStop
from gpt2_fp8.callbacks.ranks import Ranks
from gpt2_fp8.callbacks.tiers import Tiers
from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.lock import RunLock
from gpt2_fp8.checkpoint.manifest import SKELETON, read_json
from gpt2_fp8.config.checks import check_batch
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.schema import PlainPrecisionConfig, RunConfig
from gpt2_fp8.ladder import RollBack
from gpt2_fp8.measure import auto
from gpt2_fp8.outcome import fill, last_val_loss, validation_missing
from gpt2_fp8.precision.choose import Choice
from gpt2_fp8.precision.resolve import Plan, as_before, fallen_back, resolve
from gpt2_fp8.process import forget, quiet, rank
from gpt2_fp8.recovery import checkpoint_before
from gpt2_fp8.report import Precision, Summary

log = logging.getLogger(__name__)


def run(config: RunConfig, folder: Path) -> float | None:
    """Train as `config` says, in `folder`; returns the last validation loss (what a sweep compares).

    Writes `summary.json` at every end, good or bad. Raises the errors of `config.errors` for ends of a known kind.
    """
    quiet()
    alone = rank() == 0 and not config.trainer.fast_dev_run
    with RunLock(folder) if alone else nullcontext():
        return _run(config, folder)


def _run(config: RunConfig, folder: Path) -> float | None:
    summary = Summary(precision=Precision(asked=config.precision.name), recipe=_recipe(config))
    tiers = Tiers.from_config(folder / "checkpoints", config.callbacks)
    fallback = Fallback(config.callbacks, tiers.save)
    parts, error, launcher = None, None, None

    def farewell(lost: RunError) -> None:
        """The summary of a run whose main thread hangs in a collective."""
        if parts is not None:
            fill(summary, parts, fallback, tiers)
        summary.finish(lost)
        if rank() == 0:
            summary.write(folder)

    ranks = Ranks(farewell)
    try:
        with GracefulStop(lambda trainer: _stop_here(trainer, tiers)) as stop:
            device = startup.device(config)
            world_size = startup.devices(config, device) * config.trainer.num_nodes
            check_batch(config, world_size)
            config = startup.settle_micro_batch(config, world_size, device)
            checkpoint = startup.checkpoint(config, folder)
            if rank() == 0:
                startup.check_room(config, tiers.folder)
            config, choice = auto.settle(config, device, world_size, checkpoint, rank())
            plan = _plan(config, device, choice, checkpoint)
            summary.recipe, summary.precision.choice = _recipe(config), asdict(choice) if choice else None
            while parts is None:
                parts = build(config, plan, folder, checkpoint, fallback, [ranks, tiers, stop])
                launcher = launcher or parts.trainer.strategy.launcher  # the first one starts the other ranks
                startup.announce(config, plan, parts.module.vocab_size, world_size, folder, checkpoint)
                if back := _fit(parts, checkpoint):
                    plan, checkpoint = _go_back(back, config, parts, checkpoint, fallback, tiers)
                    fill(summary, parts, fallback, tiers)
                    parts = None  # its memory is needed
                    forget()
            if validation_missing(parts, tiers):
                parts.trainer.validate(parts.module, datamodule=parts.data, verbose=False)
        return last_val_loss(parts, tiers)
    except BaseException as caught:
        error = ranks.explain(caught)  # a torn connection is another rank's end
        if error is not caught:
            raise error from None
        raise
    finally:
        if parts is not None:
            parts.data.say_documents()
            parts.data.teardown()  # Lightning leaves it out where `fit` raises
            with nullcontext() if error is None else suppress(Exception):  # a GPU that has failed answers nothing more
                fill(summary, parts, fallback, tiers)
        summary.finish(error)
        refused = isinstance(error, UserError) and pointers.steps(tiers.folder)
        if rank() == 0 and not refused:  # what a run has reached is not replaced by a line that was not accepted
            summary.take_over(folder)
            log.info("%s: %s", summary.status, summary.write(folder))
        if error is not None:
            ranks.take_over(launcher)  # where the run did not come so far
            ranks.end_children()
        ranks.close()
        forget()


def _stop_here(trainer: Any, tiers: Tiers) -> None:
    """Save the run for a signal, which may have come in the midst of a validation."""
    trainer.lightning_module.leave_validation()
    tiers.save_now(trainer)


def _fit(parts: Parts, checkpoint: Path | None) -> RollBack | None:
    """Train to the end; or to where the run has to go back, and why."""
    try:
        parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=False)
    except RollBack as back:
        return back.with_traceback(None)  # which holds the model
    return None


def _go_back(
    back: RollBack, config: RunConfig, parts: Parts, checkpoint: Path | None, fallback: Fallback, tiers: Tiers
) -> tuple[Plan, Path | None]:
    """What to go on with after a rollback, and from where; the same on all ranks, whose checkpoints rank 0 reads.

    `checkpoint`: what the run has continued from so far.
    """
    parts.data.teardown()
    path = checkpoint_before(back, tiers.folder, fallback.saved, checkpoint) if rank() == 0 else None
    path = parts.trainer.strategy.broadcast(path)
    fallback.start_again()
    for callback in parts.trainer.callbacks:  # type: ignore[attr-defined]
        for method in ("log", "log_dict"):  # Lightning gives the module's to them, which would keep it in memory
            vars(callback).pop(method, None)
    return fallen_back(parts.plan, config, f"fallback at step {back.step}: {back.reason}"), path


def _plan(config: RunConfig, device: Literal["cuda", "cpu"], choice: Choice | None, checkpoint: Path | None) -> Plan:
    """What will run; `precision=auto` was asked for where there was a `choice`, and why comes with it. A run that has
    fallen back to bf16 stays there."""
    plan = resolve(config, device)
    if choice is not None:
        reason = choice.reason if plan.reason is None else f"{choice.reason}; {plan.reason}"
        plan = replace(plan, asked="auto", reason=reason)
    if checkpoint is None:
        return plan
    before = as_before(plan, config, read_json(checkpoint, SKELETON).get("precision", {}))
    if before.ran != plan.ran:
        log.info(
            "the run has fallen back to bf16, and stays there; another precision=NAME than %s ends that", plan.asked
        )
    return before


def _recipe(config: RunConfig) -> str | None:
    return None if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name
