"""The optimizer of a run, by the choice in the group `optimizer`, and its learning-rate schedule.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) makes a momentum orthogonal before it is applied:
its singular values become about 1. Embedding, head, biases and normalisation weights are AdamW's, as its author says.

A weight that holds several matrices (queries, keys and values, or SwiGLU's two) is one tensor here, and each of them is
made orthogonal by itself, which the author found better for queries, keys and values.

An update is multiplied by 0.2 sqrt(max(rows, columns)), so that its elements are as large as AdamW's (Liu et al. 2025,
arXiv 2502.16982). Then one rate and one weight decay fit both parts. The arithmetic is `torch.optim.Muon`'s
with `adjust_lr_fn="match_rms_adamw"`. That class itself cannot leave an update out without the host.

The learning rate has a linear warm-up, then one of four shapes.
A shape gives a part of the peak, from 1 to `min_lr_ratio`. Let m be `min_lr_ratio`, and x the part of the steps after
the warm-up that is done, 0 to 1:

    cosine                m + (1 - m) (1 + cos(pi x)) / 2    Loshchilov and Hutter 2017 (arXiv 1608.03983), eq. 5,
                                                             without restarts
    linear                1 - (1 - m) x                      Bergsma et al. 2025 (arXiv 2502.15938), who end at m = 0
    constant              1
    warmup_stable_decay   1, and 1 - (1 - m) y at the end    Hu et al. 2024 (arXiv 2404.06395), with the linear decay of
                                                             Hägele et al. 2024 (arXiv 2405.18392)

y is the part of the last `decay_steps` steps that is done. After the last step the rate stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt2_fp8.compat.torch_private import orthogonalize, skip_on_host, skip_where, skips_where
from gpt2_fp8.config.schema import AdamWOptimizer, MuonOptimizer, OptimConfig, OptimizerConfig, RegisteredOptimizer
from gpt2_fp8.engine.small_adamw import Keys, SmallAdamW, new_moments
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.parameters import is_block_matrix, packed_rows
from gpt2_fp8.runtime import collectives, registry

_Named = list[tuple[str, Tensor]]
_ADAMW = AdamWOptimizer(name="adamw")
BATCH_BYTES = 1 << 27  # of Muon's updates in bfloat16 that are made orthogonal together
_TABLES = ("positions.weight", "tokens.weight")
_LIKE_ADAMW = 0.2  # the root mean square of AdamW's updates without its rate, as Liu et al. measured it


def build_optimizer(
    model: nn.Module, config: OptimConfig, choice: OptimizerConfig = _ADAMW, seed: int = 0
) -> Optimizer:
    """Build an optimizer. Only matrices have weight decay; biases and normalisation weights have one dimension.

    Parameters are ordered by name, so that a checkpoint's optimizer state fits any family of layers. `seed`: of the
    random bits that round a state. Muon needs one of our models, which says what its matrices hold.
    """
    named: _Named = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    if isinstance(choice, MuonOptimizer):
        return _muon(model, named, config, choice)
    if isinstance(choice, RegisteredOptimizer):
        made: Optimizer = registry.make("optimizer.factory", choice.factory, Optimizer, _groups(named, config), config)
        skip_on_host(made)
        return made
    if choice.name == "adamw":
        return _fused_adamw(named, config)
    keys: dict[Tensor, Keys] = {parameter: Keys.of(seed, name) for name, parameter in named}
    settings = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    groups = [settings | group for group in _groups(named, config)]
    return SmallAdamW(groups, keys)


def state_like(model: nn.Module, choice: OptimizerConfig) -> list[Tensor]:
    """Allocate as much memory as the optimizer's state of a model takes, on the parameters' device."""
    found: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if choice.name == "adamw_bf16":
            found += new_moments(parameter).values()
        elif isinstance(choice, RegisteredOptimizer):
            found.append(parameter.new_empty(choice.state_bytes * parameter.numel(), dtype=torch.uint8))
        else:
            one = choice.name == "muon" and is_block_matrix(name, parameter.shape)
            found += [torch.empty_like(parameter) for _ in range(1 if one else 2)]
    return found


def _fused_adamw(named: _Named, config: OptimConfig) -> AdamW:
    groups = _groups(named, config)
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _groups(named: _Named, config: OptimConfig) -> list[dict[str, Any]]:
    """Divide parameters, ordered by name, by their rates. The first group has `optim.lr`, and may be empty.

    Tables with a rate of their own are a group between the other matrices and the vectors. That is also the order of
    their names: whatever the rates, the groups in a row hold the parameters in the same order, by which a checkpoint
    has their state.
    """
    apart = _TABLES if config.embedding_lr else ()
    by_rate: dict[str, list[Tensor]] = {"lr": [], "embedding_lr": [], "scalar_lr": []}
    for name, parameter in named:
        of_matrix = "embedding_lr" if name in apart else "lr"
        by_rate[of_matrix if parameter.dim() >= 2 else "scalar_lr"].append(parameter)
    groups = []
    for key, parameters in by_rate.items():
        rate = getattr(config, key) if key != "lr" else None  # which the optimizer itself is given
        if parameters or key in ("lr", "scalar_lr"):
            decay = config.weight_decay if key != "scalar_lr" else 0.0
            groups.append({"params": parameters, "weight_decay": decay} | ({"lr": rate} if rate else {}))
    return groups


def _muon(model: nn.Module, named: _Named, config: OptimConfig, choice: MuonOptimizer) -> MuonAdamW:
    assert isinstance(model, GPT2)
    matrices = {name: p for name, p in named if is_block_matrix(name, p.shape)}
    return MuonAdamW(
        _fused_adamw([(name, p) for name, p in named if name not in matrices], config),
        matrices.values(),
        {p: packed_rows(model.spec, name, len(p)) for name, p in matrices.items()},
        lr=choice.matrix_lr or config.lr,
        weight_decay=config.weight_decay,
        momentum=choice.momentum,
        steps=choice.ns_steps,
    )


class MuonAdamW(Optimizer):
    """Muon for the matrices of the blocks, and torch's fused AdamW for everything else: its groups, then Muon's.

    If what `skip_where` has told it is 1, a step changes nothing, and the host does not wait to know.

    Args:
        adamw: has the groups of all other parameters. It is used, and its groups and state are this optimizer's.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        *others, matrices = self.param_groups
        self._adamw.param_groups, self._adamw.state = others, self.state  # loading a state has replaced them
        if (skip := skips_where(self)) is not None:
            skip_where(self._adamw, skip)
        self._adamw.step()
        own = [matrix for matrix in matrices["params"] if matrix.grad is not None]
        for matrix in own:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        for matrix in self._update_together(own, matrices):
            self._update(matrix, matrix.grad, matrices)
        return loss

    def _update(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        before = self.state[matrix]["momentum_buffer"]
        after = before.lerp(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(after, group["momentum"])
        new = matrix * (1 - group["lr"] * group["weight_decay"])
        for part, update in zip(self._split(matrix, new), self._split(matrix, nesterov), strict=True):
            part.add_(orthogonalize(update, group["ns_steps"]), alpha=-_rate(part.shape, group))
        skip = skips_where(self)
        for kept, changed in ((before, after), (matrix, new)):
            kept.copy_(changed if skip is None else torch.where(skip != 0, kept, changed))

    def _update_together(self, matrices: list[Any], group: dict[str, Any]) -> list[Any]:
        """Update matrices on a GPU, those of one shape in a few launches. Returns those that kernels do not take.

        Every rank has all momenta and weights; it makes its part of the updates orthogonal and gets the others'.
        """
        if not matrices or not matrices[0].is_cuda:
            return matrices
        from gpt2_fp8.kernels import muon, newton_schulz

        skip = skips_where(self)
        skip = torch.zeros(1, device=matrices[0].device) if skip is None else skip
        left = []
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for matrix in matrices:
            each = (self._split(matrix, of) for of in (matrix.grad, self.state[matrix]["momentum_buffer"], matrix))
            parts = list(zip(*each, strict=True))
            if not all(newton_schulz.takes(part[0].shape) and muon.takes(*part) for part in parts):
                left.append(matrix)
                continue
            for part in parts:
                by_shape.setdefault(part[0].shape, []).append(part)
        for batch in (batch for parts in by_shape.values() for batch in _batches(parts)):
            addresses, shape = muon.put_addresses(batch), batch[0][0].shape
            updates = torch.empty(len(batch), *shape, dtype=torch.bfloat16, device=skip.device)
            muon.accumulate(addresses, updates, skip, group["momentum"])
            orthogonalize_part = partial(newton_schulz.orthogonalize_batch, steps=group["ns_steps"])
            updates = collectives.divided(updates, orthogonalize_part)
            muon.apply(addresses, updates, skip, 1 - group["lr"] * group["weight_decay"], _rate(shape, group))
        return left

    def _split(self, matrix: Tensor, of: Tensor) -> tuple[Tensor, ...]:
        """Return views of what `of`, of the shape of `matrix`, has of each matrix in it."""
        return of.split(list(self._rows.get(matrix, (len(matrix),))))


def _batches(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Yield matrices of one shape in batches, which ranks divide. Products take some five times BATCH_BYTES besides."""
    most = max(1, BATCH_BYTES // (2 * parts[0][0].numel())) * collectives.rank_and_world()[1]
    for start in range(0, len(parts), most):
        yield parts[start : start + most]


def _rate(shape: torch.Size, group: dict[str, Any]) -> float:
    return float(group["lr"]) * _LIKE_ADAMW * math.sqrt(max(shape))


def learning_rate_factor(step: int, config: OptimConfig, max_steps: int) -> float:
    """Compute the learning rate of a step (counted from 0), as a part of the peak.

    It rises linearly to the peak at `warmup_steps`, then follows `config.schedule` until `max_steps`, and stays there.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    floor = config.min_lr_ratio
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _done(step, config.warmup_steps, max_steps)))
    begin = config.warmup_steps if config.decay_steps is None else max_steps - config.decay_steps
    return 1 - (1 - floor) * _done(step, begin, max_steps)


def build_schedule(optimizer: Optimizer, config: OptimConfig, max_steps: int) -> LambdaLR:
    """Build `learning_rate_factor` as a torch scheduler, stepped once an optimizer step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, max_steps))


def _done(step: int, begin: int, end: int) -> float:
    """Return the part of the steps from `begin` to `end` that is done before `step`, 0 to 1."""
    return min(1.0, max(0, step - begin) / max(1, end - begin))
