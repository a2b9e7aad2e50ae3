"""Parts of torch's FSDP2 (`fully_shard`) without a public name. Holds for `torch>=2.11,<2.14`."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def reset_iteration(model: Any) -> None:
    """Discard what a forward or backward of `model`, the root, has begun: gathered weights, reductions under way.

    It does what `reset_iter_state` does, which torch has from 2.13 on.
    """
    root = model._get_fsdp_state()
    if root._is_root is None:  # no forward has begun
        return
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    context, stream = root._comm_ctx, root._device_handle.current_stream()
    for kept in (context.all_gather_state, getattr(context, "reduce_scatter_state", None)):
        if kept is not None and kept.event is not None:
            stream.wait_event(kept.event)
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                group.finalize_backward()  # waits for what is under way
                group._reshard_after_forward_event = group._partial_reduce_output = None
                group._training_state = TrainingState.IDLE
                group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def count_collectives(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return how many collectives this rank has begun in each group of `mesh`."""
    groups: list[Any] = mesh.get_all_groups()
    return tuple(group._get_sequence_number_for_group() for group in groups)
