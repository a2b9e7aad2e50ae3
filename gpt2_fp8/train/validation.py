"""A validation of a LightningModule: sums of losses by source, and what they are logged as."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.train.metric_log import MetricLog


class Validation:
    """Sums the losses of a validation. A sanity check leaves nothing behind.

    Args:
        module: a `GPT2Module` in a Trainer, whose validation begins.
    """

    def __init__(self, module: Any):
        self.module, self.trainer = module, module.trainer
        # Sources of a mixture whose losses are told apart; the data module may be anyone's.
        self._names: list[str] = getattr(getattr(self.trainer, "datamodule", None), "val_sources", [])
        sources = max(1, len(self._names))
        self._sums = [torch.zeros(2, dtype=torch.float64, device=module.device) for _ in range(sources)]
        if self.trainer.sanity_checking:
            self._undo_scales = module.step.scaling.trial()

    def add(self, ids: Tensor, source: int) -> None:
        """Add the losses of one micro-batch, ids [sequences, n_positions + 1], to the sums of its source."""
        with torch.inference_mode(False), torch.no_grad():  # what a forward allocates may be trained with
            ids = ids.clone() if ids.is_inference() else ids
            self._sums[source] = self._sums[source] + self.module.step.evaluation.sums(ids)

    def end(self) -> None:
        """Log `val_loss`: the mean over every scored token of every rank, and of a mixture `val_loss/NAME` likewise."""
        if self.trainer.sanity_checking:
            self._undo_scales()
            return
        sums = self.trainer.strategy.reduce(torch.stack(self._sums), reduce_op="sum")
        # In float32, as Lightning keeps it beside the checkpoints.
        overall, *own = [(total / count).float().item() for total, count in (sums.sum(0), *sums)]
        self.module.val_loss = overall
        losses = {f"val_loss/{name}": loss for name, loss in zip(self._names, own, strict=False)}
        MetricLog(self.module).log_row({"val_loss": overall} | losses)
