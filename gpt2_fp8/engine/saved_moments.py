"""Whether a saved optimizer state is one of these parameters. torch accepts any tensor, and its kernels trust them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt2_fp8.engine.muon import MuonAdamW
from gpt2_fp8.engine.small_adamw import SmallAdamW


def check_moments(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Raise ValueError unless a saved optimizer state has the tensors that this optimizer keeps for its parameters.

    Their names, shapes and dtypes are checked, which torch's `load_state_dict` does not do.
    """
    named = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {index: _state_of(optimizer, parameter) for index, parameter in zip(named, parameters, strict=True)}
    if saved["state"].keys() != own.keys():  # every parameter has a gradient in each step
        raise ValueError(f"the optimizer state is of {len(saved['state'])} parameters, and the model has {len(own)}")
    for index, moments in saved["state"].items():
        _check_tensors(index, moments, own[index])


def _state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and dtypes that an optimizer keeps for a parameter, without memory."""
    like = torch.empty_like(parameter, device="meta")
    if isinstance(optimizer, SmallAdamW):
        return optimizer.new_state(like)
    if isinstance(optimizer, MuonAdamW) and any(parameter is matrix for matrix in optimizer.matrices):
        return {"momentum_buffer": like}
    return {"exp_avg": like, "exp_avg_sq": like, "step": torch.empty((), device="meta")}


def _check_tensors(index: int, found: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    for name, like in own.items():
        if name not in found:
            raise ValueError(f"the optimizer's {name} {index} is missing")
        if found[name].shape != like.shape:
            shapes = tuple(found[name].shape), tuple(like.shape)
            raise ValueError(f"the optimizer's {name} {index} is {shapes[0]}, and belongs to {shapes[1]}")
        if found[name].dtype != like.dtype:
            wanted = str(like.dtype).removeprefix("torch.")
            raise ValueError(f"the optimizer's {name} {index} is of {found[name].dtype}, not of {wanted}")
    if others := found.keys() - own.keys():
        raise ValueError(f"the optimizer has no {min(map(str, others))[:40]!r} {index}")
