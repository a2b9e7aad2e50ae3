"""Logits for a caller's own ids, from the model of a training step. Plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.engine.training_step import TrainingStep


def logits(step: TrainingStep, ids: Tensor, vocab_size: int) -> Tensor:
    """Compute logits [sequences, tokens, vocab_size] of integer ids [sequences, tokens], without gradients.

    They are computed in the precision of the run's validations, on the layers' device. Raises UserError for ids of
    another shape, for more tokens than positions, and for FP8 layers that have no scales yet.
    """
    if ids.dim() != 2:
        remedy = "ids[None] of one sequence" if ids.dim() == 1 else "ids of shape [sequences, tokens]"
        raise UserError.of(f"ids have the shape {list(ids.shape)}, and the model takes [sequences, tokens]", remedy)
    tokens, n_positions = ids.shape[1], step.config.model.n_positions
    if tokens > n_positions:
        raise UserError.of(f"{tokens} tokens, and the model has {n_positions} positions", f"ids[:, -{n_positions}:]")
    in_fp8 = step.plan.fp8 and not step.plan.evaluates_in_bf16
    with step.evaluation.forwards() as model:
        if in_fp8 and not step.scaling.ready:
            raise UserError.of("the FP8 layers have no scales yet", "a training step or Trainer.validate finds them")
        if in_fp8:  # which takes multiples of 16; a causal model does not see what follows
            ids = functional.pad(ids, (0, n_positions - tokens))
        found: Tensor = model(ids)
    return found[:, :tokens, :vocab_size]
