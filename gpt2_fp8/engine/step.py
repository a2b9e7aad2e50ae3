"""One optimizer step: split into micro-batches, forward, backward, check, clip, update. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt2_fp8.compat.torch_private import skip_where
from gpt2_fp8.engine.exchange import Exchange
from gpt2_fp8.fp8.base import LossOf
from gpt2_fp8.model.loss import loss_parts, trained_loss
from gpt2_fp8.runtime import collectives, signals
from gpt2_fp8.runtime.moments import Gap, Sent


class Verdict(NamedTuple):
    """What the host learns of a step; the same on all ranks."""

    loss: float  # the cross-entropy, mean over all ranks' tokens, before the update
    skipped: bool  # the loss, a penalty or the gradient's norm was not finite, so the update did nothing
    amax_outliers: int = 0  # FP8 tensors whose amax has jumped: see `fp8.scaling`
    grad_norm: float = 0.0  # global L2 norm before clipping
    clip_ratio: float = 1.0  # the factor by which the gradients were multiplied; 1 without clipping
    penalty: float | None = None  # what was added to the loss, mean over all ranks; None if nothing was


@dataclass
class StepResult:
    """The result of a step, as it comes to the host."""

    sent: Sent
    lr: float  # of the update
    gap: Gap | None = None  # since the step before it; None for the first
    first: Verdict | None = None  # the verdict on the FP8 attempt before this one, if the step was run again

    def read(self) -> Verdict:
        """Return the verdict. On a GPU this waits for the gradient's norm, but not for the update.

        The GPU still computes the update while the host goes on to the next step.
        """
        bad, loss, outliers, grad_norm, clip_ratio, *penalty = self.sent.read()
        return Verdict(loss, bad > 0, round(outliers), grad_norm, clip_ratio, *penalty)


def accumulate(
    ids: Tensor,
    micro_batch_size: int,
    loss_of: LossOf,
    forward_context: Callable[[], AbstractContextManager],
    backward: Callable[[Tensor], None],
    part_context: Callable[[bool], AbstractContextManager] = lambda last: nullcontext(),
) -> Tensor:
    """Add the gradients of the mean loss over `ids` to the parameters' `.grad`, one micro-batch after the other.

    ids: [sequences, tokens + 1]. Returns the mean loss, float32 on the device; with penalties [3], as `model.loss`
    says. `loss_of(ids, is_first_microbatch, scale)` is `scale` times the mean loss of a micro-batch. It is called
    inside `forward_context`; `backward` is called outside of it. There is no collective here: see `engine.exchange`,
    also for `part_context`. In a single process, a signal ends it between two passes.
    """
    total = torch.zeros((), dtype=torch.float32, device=ids.device)
    parts = ids.split(micro_batch_size)
    for i, part in enumerate(parts):
        signals.look()
        with part_context(i == len(parts) - 1):
            with forward_context():
                loss = loss_of(part, i == 0, len(part) / len(ids))
            signals.look()
            backward(trained_loss(loss))
        total = total + loss.detach()
    return total


def update(
    optimizer: Optimizer,
    apply: Callable[[], object],
    exchange: Exchange,
    loss: Tensor,
    max_grad_norm: float,
    amax_outliers: Tensor | None = None,
) -> StepResult:
    """Clip, and apply the update unless the loss or the gradient's norm is not finite on any rank.

    `loss` is what `accumulate` returns.

    The device decides (torch's fused optimizers skip if `found_inf` is set), so the update does not wait for the host.
    `apply` calls the optimizer's `step`, through whatever wraps it. `amax_outliers` becomes part of the verdict:
    float32, the same on all ranks.
    """
    grad_norm = exchange.clip(max_grad_norm)
    clip_ratio = (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    # Before the update: the host learns it while the device still computes that.
    seen = _reduce(*loss_parts(loss), grad_norm, amax_outliers)
    sent = Sent(torch.cat([seen[:3], torch.stack([grad_norm, clip_ratio]).float(), seen[3:]]))
    skip_where(optimizer, seen[0].clamp(max=1.0))
    apply()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(sent, optimizer.param_groups[0]["lr"])


def _reduce(loss: Tensor, penalty: Tensor | None, grad_norm: Tensor, outliers: Tensor | None) -> Tensor:
    """Return float32 on the device: how many ranks are not finite, then the mean loss, `outliers` and any penalty."""
    bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
    means = [loss.detach(), torch.zeros_like(loss) if outliers is None else outliers]
    if penalty is not None:
        bad = bad | ~torch.isfinite(penalty)
        means.append(penalty.detach())
    seen = torch.stack([value.float() for value in (bad, *means)])
    if collectives.is_distributed():
        torch.distributed.all_reduce(seen)
        seen[1:] /= torch.distributed.get_world_size()
    return seen
