"""Muon for the matrices of the blocks, and torch's fused AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) makes a momentum orthogonal before it is applied:
its singular values become about 1. Embedding, head, biases and normalisation weights are AdamW's, as its author says.

A weight that holds several matrices is one tensor here: queries, keys and values, or SwiGLU's gate and its other half.
Each is made orthogonal by itself. The author found that better for queries, keys and values. As one matrix they would
share one set of singular values, though they are multiplied with the same input for three purposes.

An update is multiplied by 0.2 sqrt(max(rows, columns)), so that its elements are as large as AdamW's (Liu et al. 2025,
arXiv 2502.16982). Then one rate and one weight decay fit both parts. The arithmetic is `torch.optim.Muon`'s
with `adjust_lr_fn="match_rms_adamw"`. That class itself cannot leave an update out without the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from gpt2_fp8.compat.torch_private import orthogonalised, skip_where, skips_where

_LIKE_ADAMW = 0.2  # the root mean square of AdamW's updates without its rate, as Liu et al. measured it


class MuonAdamW(Optimizer):
    """Both, over three groups: AdamW's two, then Muon's matrices.

    If what `skip_where` has told it is 1, a step changes nothing, and the host does not wait to know.

    Args:
        adamw: has the two groups of all other parameters. It is used, and its groups and state are this optimizer's.
        matrices: with two dimensions, in float32.
        rows: of a matrix that holds several, the rows of each.
        lr, weight_decay, momentum, steps: of the matrices; `steps` are Newton-Schulz iterations.
    """

    def __init__(
        self,
        adamw: AdamW,
        matrices: Iterable[Tensor],
        rows: Mapping[Tensor, tuple[int, ...]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        steps: int,
    ):
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": steps}
        super().__init__([*adamw.param_groups, {"params": list(matrices), **settings}], {})
        self._adamw, self._rows = adamw, dict(rows)

    @property
    def matrices(self) -> list[Tensor]:
        """The parameters that Muon updates."""
        return list(self.param_groups[-1]["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        *others, matrices = self.param_groups
        self._adamw.param_groups, self._adamw.state = others, self.state  # loading a state has replaced them
        if (skip := skips_where(self)) is not None:
            skip_where(self._adamw, skip)
        self._adamw.step()
        for matrix in matrices["params"]:
            if matrix.grad is not None:
                self._update(matrix, matrix.grad, matrices)
        return loss

    def _update(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        before = state["momentum_buffer"]
        after = before.lerp(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(after, group["momentum"])
        new = matrix * (1 - group["lr"] * group["weight_decay"])
        rows = list(self._rows.get(matrix, (len(matrix),)))
        for part, update in zip(new.split(rows), nesterov.split(rows), strict=True):
            rate = group["lr"] * _LIKE_ADAMW * math.sqrt(max(part.shape))
            part.add_(orthogonalised(update, group["ns_steps"]), alpha=-rate)
        skip = skips_where(self)
        for kept, changed in ((before, after), (matrix, new)):
            kept.copy_(changed if skip is None else torch.where(skip != 0, kept, changed))
