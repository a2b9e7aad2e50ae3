"""`FP8Precision` under a LightningModule that is not ours, in FP8's matrix units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gpt2_fp8 import FP8Precision
from tests.train.test_precision_plugin import made, texts, trainer

pytestmark = pytest.mark.fp8


@pytest.mark.parametrize(
    ("backend", "recipe"), [("te", "current"), ("te", "delayed"), ("te", "block"), ("torchao", "current")]
)
def test_products_are_in_fp8_and_a_run_continues_to_the_bit(tmp_path: Path, backend: Any, recipe: str) -> None:
    def fit(epochs: int, checkpoint: Path | None = None, **options: Any) -> Any:
        plugin = FP8Precision(recipe=recipe, backend=backend, keep_bf16=["lm_head"], fallback="error")
        module = made()
        run = trainer(tmp_path, plugin, epochs, accelerator="gpu", enable_checkpointing=False, **options)
        run.fit(module, texts(), texts(), ckpt_path=checkpoint, weights_only=False)
        assert plugin.converted == ["blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3"]
        return run, module

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        whole = fit(2)[1]
    products = [event.key for event in seen.key_averages() if "e4m3" in event.key.lower() or "f8" in event.key.lower()]
    assert products, [event.key for event in seen.key_averages()]
    losses = torch.stack(whole.losses)
    assert losses.isfinite().all()
    assert losses[-1] < losses[0]
    validated = fit(2, limit_val_batches=2)[1]  # before the first step too, in inference mode
    assert torch.equal(torch.stack(validated.losses), losses)
    first, _ = fit(1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    continued = fit(2, tmp_path / "one.ckpt")[1]
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, continued.state_dict()[name]), name
