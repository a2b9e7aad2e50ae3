"""The loss of next-token prediction, on a GPU in a fused kernel, and the penalties that training adds to it.

A loss without penalties is a scalar. A loss with some is float32 [3]: what is trained, the cross-entropy alone, and the
penalties alone. Only the first has a gradient. docs/penalties.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.model.gpt2 import GPT2

NO_PENALTY = PenaltyConfig()


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Split token ids [batch, n_positions + 1] into inputs and targets [batch, n_positions], int64.

    Padding (-1) becomes token 0 as an input and stays -1 as a target.
    """
    ids = ids.long()
    return ids[:, :-1].clamp_min(0), ids[:, 1:]


def loss_of(
    model: GPT2, ids: Tensor, is_first_microbatch: bool | None, scale: float, fused: bool, penalty: PenaltyConfig,
    targets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `scale` times the mean loss over the targets of `ids` [sequences, n_positions + 1], float32.

    Or over `targets`, integers of the shape of `ids` [sequences, tokens]; a negative one has no loss.

    With gradients, `penalty` is added. `is_first_microbatch`: see `GPT2.forward`. `fused`: see `cross_entropy`; a head
    with a loss of its own does not ask for it.
    """
    return model.as_forward(_loss, ids, is_first_microbatch, scale, fused, penalty, targets)


def _loss(
    model: GPT2, ids: Tensor, is_first_microbatch: bool | None, scale: float, fused: bool, penalty: PenaltyConfig,
    targets: Tensor | None,
) -> Tensor:  # fmt: skip
    penalty = penalty if torch.is_grad_enabled() else NO_PENALTY
    inputs, targets = split(ids) if targets is None else (ids.long(), targets.long())
    outputs: list[Tensor] | None = [] if penalty.activation_l1 else None
    x = model.hidden_states(inputs, is_first_microbatch, outputs)
    if chunked := getattr(model.head, "loss", None):
        loss = chunked(x, targets, model.vocab_size, scale, is_first_microbatch, penalty)
    else:
        loss = cross_entropy(model.head(x, is_first_microbatch), targets, model.vocab_size, fused, scale, penalty)
    if outputs is None:
        return loss
    amount = _sum_of_activations(outputs, targets, penalty.activation_l1)
    return _add_penalty(loss, amount * scale / torch.count_nonzero(targets >= 0).clamp_min(1))


def cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, fused: bool, scale: float = 1.0,
    penalty: PenaltyConfig = NO_PENALTY,
) -> Tensor:  # fmt: skip
    """Compute `scale` times the mean cross-entropy over targets that are not negative, and the penalties on logits.

    logits: [batch, tokens, padded vocabulary]; columns from `vocab_size` on are ignored. targets: int64 [batch,
    tokens]. `fused` (CUDA only) overwrites the logits with their gradient: `kernels.cross_entropy`.
    """
    targets = targets.flatten()
    if fused:
        from gpt2_fp8.kernels.cross_entropy import fused_cross_entropy

        rows, weights = logits.view(-1, logits.shape[-1]), (penalty.z_loss, penalty.logit_l2)
        return fused_cross_entropy(rows, targets, vocab_size, scale, *weights)
    logits = logits[..., :vocab_size].float().flatten(0, -2)
    total = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    counted = torch.count_nonzero(targets >= 0).clamp_min(1)
    loss = total * scale / counted
    return _add_penalty(loss, _sum_of_logits(logits, targets, penalty) * scale / counted) if penalty.of_logits else loss


def trained_loss(loss: Tensor) -> Tensor:
    """Return the scalar whose gradient is wanted."""
    return loss if loss.dim() == 0 else loss[0]


def loss_parts(loss: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the cross-entropy alone, and the penalties alone; None if there are none."""
    return (loss, None) if loss.dim() == 0 else (loss[1], loss[2])


def _add_penalty(loss: Tensor, amount: Tensor) -> Tensor:
    """Add a penalty, a float32 scalar, to a loss, which may have others already. Returns float32 [3]."""
    if loss.dim() == 0:
        return torch.stack([loss + amount, loss.detach(), amount.detach()])
    return loss + torch.stack([amount, torch.zeros_like(amount), amount.detach()])


def _sum_of_logits(logits: Tensor, targets: Tensor, penalty: PenaltyConfig) -> Tensor:
    """Compute the sum of a batch's penalties on logits over the targets that are not negative, a float32 scalar.

    logits: float32 [rows, vocabulary], without padded columns. targets: int64 [rows].
    """
    each = torch.zeros((), device=logits.device)
    if penalty.z_loss:
        each = each + penalty.z_loss * logits.logsumexp(-1).square()
    if penalty.logit_l2:
        each = each + penalty.logit_l2 * logits.square().mean(-1)
    return torch.where(targets >= 0, each, 0.0).sum()


def _sum_of_activations(outputs: Sequence[Tensor], targets: Tensor, weight: float) -> Tensor:
    """Compute `weight` times the sum of |x| over the targets that are not negative, a float32 scalar.

    outputs: what each block gives, [batch, tokens, n_embd]; the mean over blocks and channels is taken. targets: int64
    [batch, tokens].
    """
    each = torch.stack([x.float().abs().mean(-1) for x in outputs]).mean(0)
    return weight * torch.where(targets >= 0, each, 0.0).sum()
