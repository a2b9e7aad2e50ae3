"""What a checked configuration means on this machine: devices, micro-batch and checkpoint. The log says so."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from gpt2_fp8.callbacks.same_run import log_kernels
from gpt2_fp8.checkpoint import find, lock
from gpt2_fp8.checkpoint.manifest import read_manifest
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.run_length import bf16_last_steps, last_step, steps_to_run, tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import counted
from gpt2_fp8.engine.out_of_memory import largest_divisor
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import flops_per_token, optimizer_bytes, parameter_count, peak_bf16_flops
from gpt2_fp8.runtime import ranks, rendezvous

log = logging.getLogger(__name__)
MOST_ON_CPU = 8  # sequences of a micro-batch that `auto` chooses
MOST_FLOPS = 250_000_000_000  # of a micro-batch on a CPU that was not typed: seconds, between which signals are heard


def resolve_micro_batch(
    config: RunConfig, world_size: int, on: Literal["cuda", "cpu"], typed: Container[str]
) -> RunConfig:
    """Replace a micro-batch that is `auto`, or too long for a CPU.

    `auto` is a rank's whole share of a step, of which a GPU takes what fits. On a CPU a number that is not among the
    keys `typed` is lowered to what takes seconds.
    """
    share, auto = config.global_batch_size // world_size, config.micro_batch_size == "auto"
    most = min(share, MOST_ON_CPU if on == "cpu" else share) if auto else config.micro_batch
    if on == "cpu" and (auto or "micro_batch_size" not in typed):
        flops = flops_per_token(config.model, padded_vocabulary(vocabulary(config))) * config.model.n_positions
        most = min(most, max(1, MOST_FLOPS // flops))
    if most == config.micro_batch_size:
        return config
    return replace(config, micro_batch_size=largest_divisor(share, most))


def check_room(config: RunConfig, checkpoints: Path, epochs: int) -> None:
    """Raise UserError if the run's checkpoints, with those of `epochs`, cannot be written, or will not have room."""
    if config.trainer.fast_dev_run:
        return
    parameters = parameter_count(config.model, padded_vocabulary(vocabulary(config)))
    state = optimizer_bytes(config.optimizer, config.model, padded_vocabulary(vocabulary(config)))
    saved = config.callbacks
    permanent = (last_step(config) // saved.keep_every_n_steps if saved.keep_every_n_steps else 0) + epochs
    between = bool(saved.checkpoint_every_n_steps or saved.checkpoint_every_minutes)
    at_once = lock.peak_count(saved.keep_checkpoints, permanent, config.data.val_sequences > 0, between)
    lock.check_space(checkpoints, at_once * lock.checkpoint_bytes(parameters, state))


def find_checkpoint(config: RunConfig, folder: Path) -> Path | None:
    """Return the checkpoint to continue from, or None for a fresh start. The log says so if `last` found nothing.

    Its files' digests are checked. Raises UserError if none is whole, or if the folder has those of another run.
    """
    own = folder / "checkpoints"
    if config.ckpt_path is None:
        return None
    found = find.resolve(config.ckpt_path, own)
    if found is None:
        log.info("ckpt_path=%s: no checkpoint in %s yet, so this is a fresh start", config.ckpt_path, folder)
    elif found.resolve().parent != own.resolve() and any(own.glob("*/manifest.json")):
        cause = f"ckpt_path={found} is of another run, and {folder} has checkpoints of its own"
        raise UserError.of(cause, "give a new run_name")
    return found


def step_of(checkpoint: Path | None) -> int | None:
    """Return the optimizer step of a checkpoint."""
    return None if checkpoint is None else int(read_manifest(checkpoint)["global_step"])


def announce(config: RunConfig, plan: Plan, vocab_size: int, world_size: int, folder: Path, start: Path | None) -> None:
    """Log what was chosen and why, in at most a dozen lines."""
    model, padded_vocab_size = config.model, padded_vocabulary(vocab_size)
    tokens = tokens_a_step(config)
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "the CPU"
    peak = peak_bf16_flops(name)
    log.info(
        "model      %s: %s parameters, vocabulary %s padded to %s",
        model.name, *(f"{n:,}" for n in (parameter_count(model, padded_vocab_size), vocab_size, padded_vocab_size)),
    )  # fmt: skip
    log.info("device     %s x %d", name, world_size)
    if (place := ranks.current()).launcher:
        met = rendezvous.joined()
        log.info("launcher   %s%s", place, ", started again" if met is not None and met.kept else "")
    ran = f"{plan.ran}, recipe {plan.recipe}" if plan.fp8 else plan.ran
    ran += ", evaluation bf16" if plan.evaluates_in_bf16 else ""
    ran += f", last {counted(steps, 'step')} bf16" if plan.fp8 and (steps := bf16_last_steps(config)) else ""
    if plan.reason is None:
        log.info("precision  %s", ran)
    else:
        log.info("precision  %s instead of %s: %s", ran, plan.asked, plan.reason)
    log_kernels(plan.backend.kernels(vocab_size), plan.slower())
    state = optimizer_bytes(config.optimizer, model, padded_vocab_size) / parameter_count(model, padded_vocab_size)
    log.info("optimizer  %s: %.3g bytes of state a parameter", config.optimizer.name, state)
    log.info("data       %s, tokenizer %s", config.data.name, config.data.tokenizer)
    log.info(
        "steps      %s of %s x %s = %s tokens, in micro-batches of %s",
        *(f"{number:,}" for number in (steps_to_run(config), config.global_batch_size, model.n_positions, tokens)),
        counted(config.micro_batch, "sequence"),
    )  # fmt: skip
    if peak:
        per_token = flops_per_token(model, padded_vocab_size)
        log.info("mfu_bf16   %.2f GFLOP a token over %.0f TFLOP/s dense bf16", per_token / 1e9, peak / 1e12)
    if start:
        log.info("continues  %s (step %s)", start, f"{step_of(start):,}")
    elif config.init_from:
        log.info("weights    from %s", config.init_from)
    log.info("folder     %s", folder)
