"""A model divided among ranks by torch's FSDP2 (`fully_shard`), and tensors of which each rank has some rows.

A unit is what is gathered at once: each block, the head if its weight is its own, and all the rest. Ranks have the rows
of a tensor in their order, the first ones as many as fit evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

AS_FORWARD = "as_forward"  # of the model: calls a function of it


class Sharding:
    """How a model is divided.

    Args:
        device: of the ranks, "cuda" or "cpu".
        world_size: the number of ranks, `copies` times as many as share a copy of the model.
        copies: of the model. A rank has the same rows as one of each other copy, and they average gradients.
        reshard: whether the gathered weights of a unit are freed between its forward and its backward.
        gather, reduce: the dtypes in which weights are gathered and gradients reduced.
    """

    def __init__(
        self, device: str, world_size: int, copies: int, reshard: bool, gather: torch.dtype, reduce: torch.dtype
    ):
        shape = (world_size,) if copies == 1 else (copies, world_size // copies)
        self.mesh: DeviceMesh = init_device_mesh(device, shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
        self.reshard = reshard
        # Inputs are not cast: blocks are given RoPE's angles, in float64.
        self._policy = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=reduce, cast_forward_inputs=False)

    def divide(self, module: nn.Module, reshard: bool | None = None) -> None:
        """Make `module` a unit, without what is one already. `reshard`: in place of this object's."""
        reshard = self.reshard if reshard is None else reshard
        fully_shard(module, mesh=self.mesh, mp_policy=self._policy, reshard_after_forward=reshard)

    def divide_rest(self, model: Any, tied: bool) -> None:
        """Make what is left of the model its root: the tables. A tied one is the head's weight too.

        A backward needs that at once, so it stays, and the values of an embedding not at all.
        """
        self.divide(model, reshard=self.reshard and not tied)
        model.set_unshard_in_backward(tied)
        register_fsdp_forward_method(model, AS_FORWARD)


def is_divided(model: nn.Module) -> bool:
    """Return whether a model is divided among ranks."""
    return isinstance(model, FSDPModule)


def free_gathered(model: nn.Module) -> None:
    """Free the weights of a divided model that a forward has left gathered: the next one gathers what the rows are."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def lend(model: nn.Module, twin: nn.Module) -> None:
    """Have `twin`, of the same parameters in modules of the same names, compute with those of `model`.

    A unit of the twin runs as a forward of the unit of `model`, which gathers the parameters and reduces gradients.
    """
    for name, unit in model.named_modules():
        if not is_divided(unit):
            continue
        other = twin.get_submodule(name)
        shared = [
            (owner, key, other.get_submodule(path))
            for path, owner in _own_modules(unit)
            for key, _ in owner.named_parameters(recurse=False, remove_duplicate=False)
        ]
        for method in ("forward",) if name else ("forward", AS_FORWARD):
            setattr(unit, f"lent_{method}", _taking(shared, getattr(other, method)))
            register_fsdp_forward_method(unit, f"lent_{method}")
            setattr(other, method, getattr(unit, f"lent_{method}"))


def _own_modules(unit: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a unit by their paths, without those of the units within it."""
    yield path, unit
    for name, child in unit.named_children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child, f"{path}.{name}" if path else name)


def _taking(shared: list[tuple[nn.Module, str, nn.Module]], compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute`, called after the parameters `shared` were taken over: whole, for they are gathered by now."""

    def computed(*inputs: Any) -> Any:
        for owner, key, borrower in shared:
            setattr(borrower, key, getattr(owner, key))
        return compute(*inputs)

    return computed


# ---- tensors of which a rank has rows --------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a divided tensor, which they share memory with; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_of(tensor: Tensor) -> ProcessGroup | None:
    """Return the ranks among which a tensor is divided; None if it is whole."""
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else None


def rows(tensor: Tensor) -> slice:
    """Return which rows of a divided tensor are this rank's; of any other all."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    mesh, last = tensor.device_mesh, tensor.device_mesh.ndim - 1
    start = min(-(-len(tensor) // mesh.size(last)) * mesh.get_local_rank(last), len(tensor))
    return slice(start, start + len(tensor.to_local()))


def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy `values`, of the whole tensor's shape, into what this rank has of `tensor`."""
    local(tensor.detach()).copy_(values[rows(tensor)])


def divided(own: Tensor, like: DTensor) -> DTensor:
    """Return the tensor of `like`'s shape of which this rank has the rows `own`."""
    return DTensor.from_local(
        own.to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(value: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """Return a state with a `copy` of each whole tensor on rank 0; other ranks get None for it.

    Collective. Tensors are gathered one by one.
    """
    if isinstance(value, dict):
        return type(value)((key, whole(each, copy)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(whole(each, copy) for each in value)
    if not isinstance(value, Tensor):
        return value
    gathered = value.full_tensor() if isinstance(value, DTensor) else value
    return copy(gathered.detach()) if torch.distributed.get_rank() == 0 else None
