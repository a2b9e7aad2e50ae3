"""How the ranks of a run share its model: each has all of it, or some rows of each tensor. Lightning's strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.files import Stored
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.sharding import ranks_of_copy
from gpt2_fp8.runtime import collectives, rendezvous, sharding
from gpt2_fp8.runtime.sharding import Sharding

_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}


class RanksStrategy(DDPStrategy):
    """Data parallelism whose gradients are `engine.exchange`'s.

    It forms its process group where the ranks have met, so that each generation has a new one.
    """

    def __init__(self) -> None:
        super().__init__(timeout=collectives.GROUP_TIMEOUT)

    def setup_environment(self) -> None:
        """Form the group. Ranks of Lightning's own launcher, under a script, form it themselves."""
        met = rendezvous.get_meeting()
        if met is not None and not torch.distributed.is_initialized():
            on_gpu = self.root_device.type == "cuda"
            torch.distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=met.group_store(),
                rank=met.ranks.rank,
                world_size=met.ranks.world_size,
                timeout=collectives.GROUP_TIMEOUT,
                device_id=self.root_device if on_gpu else None,
            )
        super().setup_environment()

    def configure_ddp(self) -> None:
        """Give every rank rank 0's weights. No DistributedDataParallel: it would hold a copy of all gradients."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            torch.distributed.broadcast(tensor.data, 0)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint's folder; weights and the optimizer's state stay in their files until they are taken."""
        return files.read(checkpoint_path, stored=True)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers what each needs of the saved tensors."""
        states = []
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            indices = [index for group in saved["param_groups"] for index in group["params"]]
            of_index = dict(zip(indices, own, strict=True))
            state = {
                index: {name: own_part(value, of_index[index]) for name, value in tensors.items()}
                for index, tensors in saved["state"].items()
            }
            states.append({**saved, "state": state})
        super().load_optimizer_state_dict({"optimizer_states": states})


class ShardedStrategy(RanksStrategy):
    """The model divided among the ranks by FSDP, as the module builds it. What it saves is the whole model's.

    Attributes:
        sharding: how it is divided, once the ranks have formed a group.
        copy_to_host: copies each whole tensor of a checkpoint, on rank 0.
    """

    sharding: Sharding
    copy_to_host: Callable[[Tensor], Tensor] = staticmethod(partial(Tensor.to, device="cpu", copy=True))

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._config = config

    def setup_environment(self) -> None:
        """See `RanksStrategy`."""
        super().setup_environment()
        options, world_size, device = self._config.trainer, self.world_size, self.root_device.type
        copies = world_size // ranks_of_copy(self._config, world_size, self.num_processes)
        assert options.gather is not None
        if copies == world_size:
            cause = f"trainer.shard={options.shard}: a node has one process, which would have the whole model"
            raise UserError.of(cause, "trainer.shard=all")
        dtypes = _DTYPES[options.gather], _DTYPES[self._config.precision.reduce]
        self.sharding = Sharding(device, world_size, copies, options.reshard is True, *dtypes)

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up what `DDPStrategy` does, without its wrapper."""
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with copies of its whole tensors, on rank 0. Collective."""
        found: dict[str, Any] = sharding.whole(state, self.copy_to_host)
        return found

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights on rank 0. Collective."""
        return self.whole(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the whole state of an optimizer on rank 0. Collective."""
        return self.whole(super().optimizer_state(optimizer))

    def teardown(self) -> None:
        """End without freeing memory, or moving the model: a GPU may wait for a rank that has run out of memory."""
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()


def own_part(value: Any, own: Tensor | None) -> Any:
    """Return what of a saved tensor belongs into this rank's tensor `own`, on its device; any other value as it is.

    A tensor of another shape is returned whole.
    """
    if not isinstance(value, (Stored, Tensor)):
        return value
    if own is None or value.shape != own.shape:
        return value.read() if isinstance(value, Stored) else value
    if not isinstance(own, DTensor):
        return value.read().to(own.device) if isinstance(value, Stored) else value
    rows = sharding.rows(own)
    return sharding.divided(value.read(rows) if isinstance(value, Stored) else value[rows], own)
