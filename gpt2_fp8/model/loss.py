"""The loss of next-token prediction, with its penalties; on a GPU in a fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.model import penalty as penalties
from gpt2_fp8.model.gpt2 import GPT2

NO_PENALTY = PenaltyConfig()
IGNORED = -1  # as a token id: the position is padding and has no loss


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

    With gradients, `penalty` is added: see `penalty` for the shape. `is_first_microbatch`: see `GPT2.forward`. `fused`:
    see `cross_entropy`; a head with a loss of its own does not ask for it.
    """
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
    amount = penalties.of_activations(outputs, targets, penalty.activation_l1)
    return penalties.add(loss, amount * scale / torch.count_nonzero(targets >= 0).clamp_min(1))


def cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, fused: bool, scale: float = 1.0,
    penalty: PenaltyConfig = NO_PENALTY,
) -> Tensor:  # fmt: skip
    """Compute `scale` times the mean cross-entropy over targets that are not negative, and the penalties on logits.

    Returns a float32 scalar, or [3] with penalties: see `model.penalty`.

    logits: [batch, tokens, padded vocabulary]; columns from `vocab_size` on are ignored. targets: int64 [batch,
    tokens]. `fused` (CUDA only) overwrites the logits with their gradient: `kernels.cross_entropy`.
    """
    if fused:
        from gpt2_fp8.kernels.cross_entropy import fused_cross_entropy

        rows, weights = logits.view(-1, logits.shape[-1]), (penalty.z_loss, penalty.logit_l2)
        return fused_cross_entropy(rows, targets.reshape(-1), vocab_size, scale, *weights)
    logits = logits[..., :vocab_size].float().flatten(0, -2)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = total * scale / torch.count_nonzero(targets >= 0).clamp_min(1)
    if not penalty.of_logits:
        return loss
    amount = penalties.of_logits(logits, targets.flatten(), penalty)
    return penalties.add(loss, amount * scale / torch.count_nonzero(targets >= 0).clamp_min(1))
