"""The optimizer of a run: its parameter groups, by the choice in the group `optimizer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gpt2_fp8.compat.torch_private import skip_on_host
from gpt2_fp8.config.schema import AdamWOptimizer, MuonOptimizer, OptimConfig, OptimizerConfig, RegisteredOptimizer
from gpt2_fp8.engine.muon import MuonAdamW
from gpt2_fp8.engine.rounding import Keys
from gpt2_fp8.engine.small_adamw import SmallAdamW, new_moments
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.parameters import is_block_matrix, packed_rows
from gpt2_fp8.runtime import registry

_Named = list[tuple[str, Tensor]]
_ADAMW = AdamWOptimizer(name="adamw")


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
    groups = [group | settings for group in _groups(named, config)]
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
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


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
