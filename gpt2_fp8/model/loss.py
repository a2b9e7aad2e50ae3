"""The loss of next-token prediction; on a GPU in a fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -1  # as a token id: the position is padding and has no loss


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Split token ids [batch, n_positions + 1] into inputs and targets [batch, n_positions], int64.

    Padding (-1) becomes token 0 as an input and stays -1 as a target.
    """
    ids = ids.long()
    return ids[:, :-1].clamp_min(0), ids[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, fused: bool, scale: float = 1.0) -> Tensor:
    """Compute `scale` times the mean cross-entropy over targets that are not negative, in float32.

    logits: [batch, tokens, padded vocabulary]; columns from `vocab_size` on are ignored. targets: int64 [batch,
    tokens]. `fused` (CUDA only) overwrites the logits with their gradient: `kernels.cross_entropy`.
    """
    if fused:
        from gpt2_fp8.kernels.cross_entropy import fused_cross_entropy

        return fused_cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), vocab_size, scale)
    logits = logits[..., :vocab_size].float().flatten(0, -2)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total * scale / torch.count_nonzero(targets >= 0).clamp_min(1)
