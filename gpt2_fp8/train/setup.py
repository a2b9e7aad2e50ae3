"""A checked configuration on this machine: its steps, micro-batch and checkpoint; and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.manifest import read_manifest
from gpt2_fp8.config import run_length
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.run_length import steps_to_run, tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import format_count
from gpt2_fp8.data.preparation import tokens_a_pass
from gpt2_fp8.engine.divergence import RollBack
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import flops_per_token, optimizer_bytes, parameter_count, peak_bf16_flops
from gpt2_fp8.runtime import ranks, rendezvous

log = logging.getLogger(__name__)
MOST_ON_CPU = 8  # sequences of a micro-batch that `auto` chooses
MOST_FLOPS = 250_000_000_000  # of a micro-batch on a CPU that was not typed: seconds, between which signals are heard


class Length(NamedTuple):
    """How long a run is."""

    config: RunConfig  # with its number of steps as `trainer.max_steps`
    limit: str  # the key of the limit that gives this number
    epoch_ends: list[int]  # the last step of each epoch, if `callbacks.keep_epochs` asks for their checkpoints


def resolve_length(config: RunConfig, typed: Container[str] = ()) -> Length:
    """Turn the limits of a run into its number of steps. For `max_epochs` the text's tokens are counted, on each rank.

    A warm-up that is not among the keys `typed` is fitted to that number. What was typed and does not fit is refused.
    """
    tokens, kept_ends = None, []
    if config.trainer.max_epochs is not None and not config.trainer.fast_dev_run:
        tokens = tokens_a_pass(config.data, config.model.n_positions, tuple(config.plugins))
        before, config = config.optim, run_length.fit_schedule(config, typed, tokens)
        for line in run_length.describe_schedule(before, config):
            log.info(line)
        if found := list(run_length.check(config, tokens)):
            raise UserError(found)
        ends = run_length.epoch_ends(config, tokens)
        shown = ", ".join(map(str, ends if len(ends) <= 5 else [*ends[:3], "...", ends[-1]]))
        when = f"they end at the steps {shown}" if ends else "none ends within this run"
        log.info("epochs     %s tokens each; %s", f"{tokens:,}", when)
        kept_ends = ends if config.callbacks.keep_epochs else []
    elif not run_length.limits(config):  # a single step comes to no epoch
        config = replace(config, trainer=replace(config.trainer, max_steps=1))
    known, limit = run_length.limits(config, tokens), run_length.shortest(config, tokens)
    if len(known) > 1:
        longer = ", ".join(f"{key} at step {step}" for key, step in known.items() if key != limit)
        log.info("length     %s ends the run at step %d, and not %s", limit, known[limit], longer)
    return Length(run_length.in_steps(config, tokens), limit, kept_ends)


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
    return replace(config, micro_batch_size=run_length.largest_divisor(share, most))


def find_start(config: RunConfig, folder: Path) -> Path | None:
    """Return the checkpoint to continue from, verified, or None for a fresh start, also if `last` found none."""
    if config.ckpt_path is None:
        return None
    own = folder / "checkpoints"
    found = pointers.resolve(config.ckpt_path, own)
    if found is None:
        log.info("ckpt_path=%s: no checkpoint in %s yet, so this is a fresh start", config.ckpt_path, folder)
    elif found.resolve().parent != own.resolve() and any(own.glob("*/manifest.json")):
        cause = f"ckpt_path={found} is of another run, and {folder} has checkpoints of its own"
        raise UserError.of(cause, "give a new run_name")
    return found


def saved_step(checkpoint: Path | None) -> int | None:
    """Return the optimizer step of a checkpoint."""
    return None if checkpoint is None else int(read_manifest(checkpoint)["global_step"])


def choose_rollback(back: RollBack, folder: Path, saved: Collection[int], origin: Path | None) -> Path | None:
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
    path = next((path for path in candidates if _is_sound(path)), None)
    where = f"to {path}" if path else "to the start, since no sound checkpoint is older than the trouble"
    log.warning("step %d: going back %s", back.step, where)
    return path


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(tensor.float() if tensor.is_floating_point() else tensor).all())  # FP8 has no isfinite


def _is_sound(path: Path) -> bool:
    """Return whether a checkpoint can be read, with finite weights and moments.

    A weight that is not finite shows in no loss before the next step, and may have been saved meanwhile.
    """
    try:
        checkpoint = files.read(path)
    except (files.CheckpointError, OSError):
        return False
    states = [state for optimizer in checkpoint.get("optimizer_states", []) for state in optimizer["state"].values()]
    values = [value for tensors in (checkpoint["state_dict"], *states) for value in tensors.values()]
    return all(is_finite(value) for value in values if isinstance(value, Tensor))


def announce(config: RunConfig, plan: Plan, vocab_size: int, world_size: int, folder: Path, start: Path | None) -> None:
    """Log what was chosen and why, in at most a dozen lines. `start`: the checkpoint that the run continues from."""
    model, padded, tokens = config.model, padded_vocabulary(vocab_size), tokens_a_step(config)
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "the CPU"
    parameters, per_token = parameter_count(model, padded), flops_per_token(model, padded)
    log.info("model      %s: %s parameters, vocabulary %s padded to %s",
             model.name, *(f"{number:,}" for number in (parameters, vocab_size, padded)))  # fmt: skip
    divided = ", which divide the model" if config.trainer.strategy == "fsdp" else ""
    log.info("device     %s x %d%s", name, world_size, divided)
    if (place := ranks.current()).launcher:
        met = rendezvous.get_meeting()
        log.info("launcher   %s%s", place, ", started again" if met is not None and met.kept else "")
    ran = f"{plan.ran}, recipe {plan.recipe}" if plan.fp8 else plan.ran
    ran += ", evaluation bf16" if plan.evaluates_in_bf16 else ""
    if plan.fp8 and (steps := run_length.bf16_last_steps(config)):
        ran += f", last {format_count(steps, 'step')} bf16"
    log.info("precision  %s", ran if plan.reason is None else f"{ran} instead of {plan.asked}: {plan.reason}")
    slower = plan.slower()
    kernels = plan.backend.kernels(vocab_size)
    layers = "; ".join(words if part == "layers" else f"{part} {words}" for part, words in kernels.items())
    layers += f"; slower than it could be: {slower}" if slower and slower not in layers else ""
    log.log(logging.WARNING if slower else logging.INFO, "layers     %s", layers)
    state = optimizer_bytes(config.optimizer, model, padded) / parameters
    averaged = "" if config.optim.ema_decay is None else "; validations, samples and exports take the EMA of weights"
    log.info("optimizer  %s: %.3g bytes of state a parameter%s", config.optimizer.name, state, averaged)
    log.info("data       %s, tokenizer %s", config.data.name, config.data.tokenizer)
    numbers = (steps_to_run(config), config.global_batch_size, model.n_positions, tokens)
    warmup = format_count(config.optim.warmup_steps, "step")
    log.info("steps      %s of %s x %s = %s tokens, in micro-batches of %s; %s of warm-up",
             *(f"{number:,}" for number in numbers), format_count(config.micro_batch, "sequence"), warmup)  # fmt: skip
    if peak := peak_bf16_flops(name):
        log.info("mfu_bf16   %.2f GFLOP a token over %.0f TFLOP/s dense bf16", per_token / 1e9, peak / 1e12)
    if start:
        log.info("continues  %s (step %s)", start, f"{saved_step(start):,}")
    elif config.init_from:
        log.info("weights    from %s", config.init_from)
    log.info("folder     %s", folder)
