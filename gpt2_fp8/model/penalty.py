"""Terms that are added to the loss in training, and how a loss says what it is made of.

A loss without penalties is a scalar. A loss with some is float32 [3]: what is trained, the cross-entropy alone, and the
penalties alone. Only the first has a gradient. docs/penalties.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt2_fp8.config.schema import PenaltyConfig


def add(loss: Tensor, amount: Tensor) -> Tensor:
    """Add a penalty, a float32 scalar, to a loss, which may have others already. Returns float32 [3]."""
    if loss.dim() == 0:
        return torch.stack([loss + amount, loss.detach(), amount.detach()])
    return loss + torch.stack([amount, torch.zeros_like(amount), amount.detach()])


def trained(loss: Tensor) -> Tensor:
    """Return the scalar whose gradient is wanted."""
    return loss if loss.dim() == 0 else loss[0]


def parts(loss: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the cross-entropy alone, and the penalties alone; None if there are none."""
    return (loss, None) if loss.dim() == 0 else (loss[1], loss[2])


def of_logits(logits: Tensor, targets: Tensor, penalty: PenaltyConfig) -> Tensor:
    """Compute the sum of a batch's penalties on logits over the targets that are not negative, a float32 scalar.

    logits: float32 [rows, vocabulary], without padded columns. targets: int64 [rows].
    """
    each = torch.zeros((), device=logits.device)
    if penalty.z_loss:
        each = each + penalty.z_loss * logits.logsumexp(-1).square()
    if penalty.logit_l2:
        each = each + penalty.logit_l2 * logits.square().mean(-1)
    return torch.where(targets >= 0, each, 0.0).sum()


def of_activations(outputs: Sequence[Tensor], targets: Tensor, weight: float) -> Tensor:
    """Compute `weight` times the sum of |x| over the targets that are not negative, a float32 scalar.

    outputs: what each block gives, [batch, tokens, n_embd]; the mean over blocks and channels is taken. targets: int64
    [batch, tokens].
    """
    each = torch.stack([x.float().abs().mean(-1) for x in outputs]).mean(0)
    return weight * torch.where(targets >= 0, each, 0.0).sum()
