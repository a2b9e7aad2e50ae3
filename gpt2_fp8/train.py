"""A run from its configuration to its summary."""

from __future__ import annotations

import gc
import logging
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8 import startup
from gpt2_fp8.build import Parts, build
from gpt2_fp8.callbacks.graceful_stop import GracefulStop
from gpt2_fp8.callbacks.tiers import Tiers
from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config.checks import check_batch
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import PlainPrecisionConfig, RunConfig
from gpt2_fp8.measure import auto
from gpt2_fp8.precision import support
from gpt2_fp8.precision.choose import Choice
from gpt2_fp8.precision.resolve import Plan, resolve
from gpt2_fp8.report import Precision, Summary

log = logging.getLogger(__name__)


def run(config: RunConfig, folder: Path) -> float | None:
    """Train as `config` says, in `folder`; returns the last validation loss (what a sweep compares).

    Writes `summary.json` at every end, good or bad. Raises the errors of `config.errors` for ends of a known kind.
    """
    _quiet()
    summary = Summary(precision=Precision(asked=config.precision.name), recipe=_recipe(config))
    tiers = Tiers(folder / "checkpoints", config.callbacks.checkpoint_every_n_steps, config.callbacks.keep_checkpoints)
    parts, error = None, None
    try:
        device = startup.device(config)
        world_size = startup.devices(config, device) * config.trainer.num_nodes
        check_batch(config, world_size)
        checkpoint = startup.checkpoint(config, folder)
        with GracefulStop(tiers.save) as stop:
            config, choice = auto.settle(config, device, world_size, checkpoint, _rank())
            plan = _plan(config, device, choice)
            summary.recipe, summary.precision.choice = _recipe(config), asdict(choice) if choice else None
            parts = build(config, plan, folder, checkpoint, [tiers, stop])
            startup.announce(config, plan, parts.module.vocab_size, world_size, folder, checkpoint)
            parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=False)
            if _final_validation_missing(parts, tiers):
                parts.trainer.validate(parts.module, datamodule=parts.data, verbose=False)
        return _last_val_loss(parts, tiers)
    except BaseException as caught:
        error = caught
        raise
    finally:
        if parts is not None:
            parts.data.say_documents()
            parts.data.teardown()  # Lightning leaves it out where `fit` raises
            _fill(summary, parts, tiers)
        summary.finish(error)
        refused = isinstance(error, UserError) and pointers.steps(tiers.folder)
        if _rank() == 0 and not refused:  # what a run has reached is not replaced by a line that was not accepted
            summary.take_over(folder)
            log.info("%s: %s", summary.status, summary.write(folder))
        if parts is not None and error is not None:
            _end_other_ranks(parts)
        _forget()


def _plan(config: RunConfig, device: Literal["cuda", "cpu"], choice: Choice | None) -> Plan:
    """What will run; `precision=auto` was asked for where there was a `choice`, and why comes with it."""
    plan = resolve(config, device)
    if choice is None:
        return plan
    reason = choice.reason if plan.reason is None else f"{choice.reason}; {plan.reason}"
    return replace(plan, asked="auto", reason=reason)


def _recipe(config: RunConfig) -> str | None:
    return None if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name


def _final_validation_missing(parts: Parts, tiers: Tiers) -> bool:
    """Whether the process before this one ended between the last step and its validation."""
    if parts.trainer.limit_val_batches == 0 or parts.trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False
    return tiers.validated_step != parts.trainer.global_step


def _last_val_loss(parts: Parts, tiers: Tiers) -> float | None:
    """The newest validation loss, or None where there was no validation."""
    value = parts.trainer.callback_metrics.get("val_loss")
    if value is None and (last := pointers.read(tiers.folder, "last")):
        return last.val_loss
    return None if value is None else float(value)


def _fill(summary: Summary, parts: Parts, tiers: Tiers) -> None:
    """What a run was like, into its summary; at any moment, also after a failure."""
    trainer, throughput, best = parts.trainer, parts.throughput, tiers.best
    summary.precision.ran, summary.precision.reason = parts.plan.ran, parts.plan.reason
    summary.recipe = summary.recipe if parts.plan.fp8 else None
    summary.steps = trainer.global_step
    summary.tokens = trainer.global_step * throughput.tokens_per_step
    summary.last_train_loss, summary.last_val_loss = throughput.train_loss, _last_val_loss(parts, tiers)
    summary.tokens_per_second, summary.skipped_steps = throughput.median_rate, throughput.skipped_steps
    if best is not None:
        summary.best_val_loss, summary.best_val_loss_step = best.val_loss, best.step
        summary.checkpoint.best = str(tiers.folder / best.checkpoint)
    if last := pointers.read(tiers.folder, "last"):
        summary.checkpoint.last = str(tiers.folder / last.checkpoint)
    summary.data = parts.data.report()
    summary.device = "cpu"
    if parts.plan.device == "cuda":
        summary.device = torch.cuda.get_device_name()
        summary.peak_memory_gb = torch.cuda.max_memory_allocated() / 2**30


def _end_other_ranks(parts: Parts) -> None:
    """End the processes that Lightning started: they may wait in a collective for this one, which has failed.

    Lightning 2.6 does so after a KeyboardInterrupt alone.
    """
    if isinstance(launcher := parts.trainer.strategy.launcher, _SubprocessScriptLauncher):
        processes = launcher.procs[:]
        launcher.procs.clear()  # Lightning watches this list, and kills this process too when one of them has failed
        for process in processes:
            process.kill()


def _rank() -> int:
    """This process's rank, also before and after the process group exists."""
    return int(getattr(rank_zero_only, "rank", 0))


def _quiet() -> None:
    """Leave the log to what this run has to say, once."""
    if _rank():
        logging.getLogger("gpt2_fp8").setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # the table of debug=profiler
    for message in (
        # Our loader is sized, reads in processes of its own, and its position is in the data module's state;
        # Lightning takes it for one that forgot all three.
        ".*does not have many workers.*",
        "Your `IterableDataset` has `__len__` defined.*",
        ".*your dataloader is not resumable.*",
        ".*recommended to use `self.log\\('val_loss'.*",  # it is the same on every rank already
        ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6 on torch 2.11 and later
    ):
        warnings.filterwarnings("ignore", message=message)


def _forget() -> None:
    """Leave nothing of this run to the next one in the process (a sweep's)."""
    gc.collect()
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    support.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
