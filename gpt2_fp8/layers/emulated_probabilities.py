"""The gradient of the emulated head's logits: as numbers, and as the E5M2 that the fused head stores.

Stored is u = 2^EXPONENT exp(logit) / exp(reference), without the -1 at a row's target, and its sum makes a row's
factor (`kernels.product_probabilities`, `kernels.references`, `kernels.probability_rows`). A row whose u saturates has
the logarithm of its own sum as its reference. What the stored number lacks at a target is computed in float32.

Penalties change the gradient to softmax more - onehot + 2 l x / vocabulary, where x is a logit and more = 1 + 2 z lse.
The number without the onehot, divided by `more`, is then in the place of the softmax, and `more` is in the factor.

Shapes: M rows, N = padded_vocab_size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.kernels.probability_grid import EXPONENT, frequent_ids
from gpt2_fp8.kernels.rounding import mean_of_rounded
from gpt2_fp8.layers.fp8_cast import LARGEST, saturated

GRADIENT, UNIT = torch.float8_e5m2, 2.0**EXPONENT
MEAN = mean_of_rounded(GRADIENT)
Penalty = tuple[float, float] | None  # the weights of z-loss and of the squared logits


class Softmax(NamedTuple):
    """The gradient of each row's loss by its logits, but for the -1 at its target."""

    values: Tensor  # float32 [M, vocabulary]
    log_sums: Tensor  # natural logarithm of the sum of exponentials, float32 [M, 1]
    more: Tensor  # what a probability counts, float32 [M, 1]


class Stored(NamedTuple):
    """The same in E5M2. All but `values` is 0 in rows whose target is negative."""

    values: Tensor  # float8_e5m2 [M, N]; times `factors` and 1 / (UNIT MEAN) it is the gradient but for the target
    factors: Tensor  # float32 [M, 1]
    rest: Tensor  # what the gradient lacks at the target, float32 [M, 1]


def softmax(logits: Tensor, vocab_size: int, penalty: Penalty) -> Softmax:
    """Compute the gradient but for the targets. logits: bfloat16 or float32 [M, N]."""
    real = logits[:, :vocab_size].float()
    values, log_sums = torch.softmax(real, 1), real.logsumexp(1, keepdim=True)
    if penalty is None:
        return Softmax(values, log_sums, torch.ones_like(log_sums))
    z_loss, logit_l2 = penalty
    more = 1 + 2.0 * z_loss * log_sums
    return Softmax(values * more + 2.0 * logit_l2 / vocab_size * real, log_sums, more)


def gradient(p: Softmax, targets: Tensor, columns: int) -> Tensor:
    """Compute the whole gradient, float32 [M, columns].

    It is 0 in rows whose target is negative and in columns from the vocabulary's end on.
    """
    vocab_size = p.values.shape[1]
    ids = torch.arange(vocab_size, device=targets.device)
    g = torch.where(ids == targets[:, None], p.values - 1, p.values)
    g = g * (targets >= 0)[:, None]
    return F.pad(g, (0, columns - vocab_size))


def stored(p: Softmax, logits: Tensor, targets: Tensor) -> Stored:
    """Cast the gradient but for the targets. logits: float32 [M, N], those of `p`."""
    counted, at = (targets >= 0)[:, None], targets.clamp_min(0)[:, None]
    (_, vocab_size), columns = p.values.shape, logits.shape[1]
    factors = torch.exp(references(logits, targets, vocab_size) - p.log_sums) * p.more
    far = p.values.abs().amax(1, keepdim=True) * UNIT > LARGEST[GRADIENT] * factors.abs()
    factors = torch.where(far, p.more, factors)
    values = saturated(F.pad(p.values * (UNIT / factors), (0, columns - vocab_size)), GRADIENT)
    has = values.view(torch.uint8).gather(1, at).view(GRADIENT).float() * factors / (UNIT * MEAN)
    rest = p.values.gather(1, at) - 1 - has
    return Stored(values, torch.where(counted, factors, 0.0), torch.where(counted, rest, 0.0))


def references(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Compute what stands for the logarithm of each row's sum of exponentials, float32 [M, 1].

    Logits of frequent ids are rounded to bfloat16, as their GEMM's result is in the fused head, and what that may have
    added is taken off.
    """
    ids = frequent_ids(targets, logits.shape[1])[:vocab_size]
    few = logits[:, ids].to(torch.bfloat16).float()
    of_frequent = few.logsumexp(1, keepdim=True) - few.amax(1, keepdim=True).abs() / 256
    at_target = logits.gather(1, targets.clamp_min(0)[:, None])
    return torch.where((targets >= 0)[:, None], torch.maximum(of_frequent, at_target), of_frequent)
