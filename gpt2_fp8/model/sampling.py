"""The next token's id, from its logits: temperature, top-k and top-p (nucleus sampling, Holtzman et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How an id is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest id.
        top_k: only so many of the likeliest ids are drawn from; None: all.
        top_p: of these, only the fewest likeliest ones whose probabilities sum to at least `top_p`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the ids that may follow and their weights, both [rows, n], the likeliest first if any are left out.

    logits: [rows, vocabulary], finite. The weights of a row are in proportion to the probabilities; those of ids that
    `top_p` leaves out are 0.
    """
    if sampling.temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
        return ids, torch.ones_like(ids, dtype=logits.dtype)
    if sampling.temperature != 1:
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # a tiny one must not overflow
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    if count < logits.shape[-1]:
        logits, ids = torch.topk(logits, count)
    elif sampling.top_p < 1:
        logits, ids = torch.sort(logits, descending=True)
    else:
        ids = torch.arange(count, device=logits.device).expand_as(logits)
    weights = logits.softmax(-1)
    if sampling.top_p < 1:
        likelier = weights.cumsum(-1) - weights  # the sum of those before; of the first it is 0
        weights = weights.masked_fill(likelier >= sampling.top_p, 0.0)
    return ids, weights


def draw(ids: Tensor, weights: Tensor, generator: torch.Generator) -> int:
    """Draw one of `ids`, [n], in proportion to `weights`, [n], on the CPU; the global random state is left alone."""
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[torch.multinomial(weights, 1, generator=generator)])
