"""How fast this machine will train, by one short forward before the first step. Plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.model.flops import flops_per_token

_TOKENS = 64  # of the forward; FP8 takes multiples of 16 or 32
_TIMES, _ENOUGH = 3, 3.0  # forwards at most, and seconds of them: the first has mostly loaded pages and woken threads
_SMALL = 1e11  # FLOPs of a step below which its own first steps tell soon enough, and a short forward tells little
_TRAINING = 3  # times the FLOPs of a forward: its backward has twice as many


def tokens_per_second(step: TrainingStep, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Estimate how many tokens a second this process trains on a CPU, within a factor of two or so; None: a small step.

    It takes seconds where a step takes many minutes. No gradient is computed, no random number is drawn, and no scale
    of FP8 changes: the run's numbers are the same without it.
    """
    model, vocabulary = step.config.model, step.model.tokens.num_embeddings
    if step.config.global_batch_size * model.n_positions * flops_per_token(model, vocabulary) < _SMALL:
        return None
    tokens = min(_TOKENS, model.n_positions)
    device = next(step.model.parameters()).device
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    took: list[float] = []
    with step.evaluation.forwards():
        while len(took) < _TIMES and sum(took) < _ENOUGH:
            began = clock()
            step.model(ids)
            took.append(max(clock() - began, 1e-6))
    flops = tokens * flops_per_token(replace(model, n_positions=tokens), vocabulary)
    return flops / min(took) / _TRAINING / flops_per_token(model, vocabulary)
