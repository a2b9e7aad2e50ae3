"""One optimizer step: split into micro-batches, forward, backward, check, clip, update. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

LossOf = Callable[[Tensor, bool | None, float], Tensor]


@dataclass
class StepResult:
    """What a step was like. Float32 scalars on the device: reading one waits for the GPU."""

    loss: Tensor  # mean over this rank's tokens, before the update
    grad_norm: Tensor  # global L2 norm before clipping
    clip_ratio: Tensor  # what the gradients were multiplied by, 1 where nothing was clipped
    lr: float  # of the update
    skipped: Tensor  # 1 where the norm was not finite, and the update did nothing


def accumulate(
    ids: Tensor,
    micro_batch_size: int,
    loss_of: LossOf,
    forward_context: Callable[[], AbstractContextManager],
    backward: Callable[[Tensor], None],
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """Gradients of the mean loss over `ids` [sequences, tokens + 1], added to the parameters' `.grad`, a micro-batch at
    a time; returns that mean loss, float32 on the device.

    `loss_of(ids, is_first_microbatch, scale)` is `scale` times the mean loss of a micro-batch; it is called inside
    `forward_context`, `backward` outside of it. Ranks exchange gradients in the last micro-batch alone; `no_sync`
    keeps them apart in the others.
    """
    total = torch.zeros((), dtype=torch.float32, device=ids.device)
    parts = ids.split(micro_batch_size)
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with nullcontext() if last else no_sync():
            with forward_context():
                loss = loss_of(part, i == 0, len(part) / len(ids))
            backward(loss)
        total += loss.detach()
    return total


def update(
    optimizer: Optimizer,
    apply: Callable[[], object],
    parameters: Iterable[Tensor],
    loss: Tensor,
    max_grad_norm: float,
) -> StepResult:
    """Clip, and apply the update unless the gradient's norm is not finite.

    The decision is taken on the device (torch's fused optimizers skip where `found_inf` is set), so nothing waits; and
    from the averaged gradient, so that all ranks take the same. A loss that is not finite has no finite gradient.
    `apply` calls the optimizer's `step`, through whatever wraps it.
    """
    parameters = list(parameters)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=True)
    clip_ratio = (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    skipped = (~torch.isfinite(grad_norm)).to(torch.float32)
    optimizer.found_inf = skipped  # type: ignore[attr-defined]  # read by torch.optim's fused kernels
    apply()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, grad_norm, clip_ratio, optimizer.param_groups[0]["lr"], skipped)
