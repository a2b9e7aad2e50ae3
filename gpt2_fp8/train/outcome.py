"""The results of a run, at any moment: for its summary, and for a sweep."""

from __future__ import annotations

import torch

from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.divergence import DivergenceGuard
from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.kernels import libraries
from gpt2_fp8.runtime import host_memory
from gpt2_fp8.train.build import Parts
from gpt2_fp8.train.summary import DivergenceReport, Summary


def validation_missing(parts: Parts, checkpointing: Checkpointing) -> bool:
    """Return whether the process before this one ended between the last step and its validation."""
    if parts.trainer.limit_val_batches == 0 or parts.trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False
    return checkpointing.validations.step != parts.trainer.global_step


def last_val_loss(parts: Parts, checkpointing: Checkpointing) -> float | None:
    """Return the newest validation loss, or None if there was no validation."""
    if parts.module.val_loss is None and (last := pointers.read(checkpointing.folder, "last")):
        return last.val_loss
    return parts.module.val_loss


def fill(summary: Summary, parts: Parts, divergence: DivergenceGuard, checkpointing: Checkpointing) -> None:
    """Write a run's results into its summary, at any moment, also after a failure."""
    trainer, throughput, best = parts.trainer, parts.throughput, checkpointing.best
    summary.precision.ran, summary.precision.reason = parts.plan.ran, parts.plan.reason
    summary.recipe = parts.plan.recipe
    summary.steps = trainer.global_step
    if (step := getattr(parts.module, "step", None)) is not None:
        summary.precision.last_in_bf16 = step.attempts.last_in_bf16
    summary.tokens = trainer.global_step * throughput.tokens_per_step
    summary.last_train_loss, summary.last_val_loss = throughput.train_loss, last_val_loss(parts, checkpointing)
    summary.tokens_per_second = throughput.median_rate
    summary.checkpoint_stall_seconds = checkpointing.stall.longest
    summary.divergence, summary.skipped_steps = (
        DivergenceReport(**divergence.policy.report()),
        divergence.policy.skipped,
    )
    if best is not None:
        summary.best_val_loss, summary.best_val_loss_step = best.val_loss, best.step
        summary.checkpoint.best = str(checkpointing.folder / best.checkpoint)
    if last := pointers.read(checkpointing.folder, "last"):
        summary.checkpoint.last = str(checkpointing.folder / last.checkpoint)
    summary.data = parts.data.report()
    summary.kernels = parts.kernels.found
    if parts.plan.device == "cpu":
        summary.device, summary.peak_memory_gb = "cpu", host_memory.peak_gb()
    else:
        summary.versions |= libraries.versions()
        summary.device = torch.cuda.get_device_name()
        summary.peak_memory_gb = max(summary.peak_memory_gb or 0.0, parts.memory.peak_gb or 0.0)
        summary.training_memory_gb = parts.memory.training_gb
        summary.validation_memory_gb = parts.memory.validation_gb or summary.validation_memory_gb
