"""`FP8Precision` under a LightningModule that is not ours, in FP8's matrix units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
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


def test_transformer_engines_layers_call_hooks_and_a_weight_that_one_computes_stays(tmp_path: Path) -> None:
    module, seen = made(), list[str]()
    norm, linear, *_ = module.blocks[0]
    norm.register_forward_hook(lambda *_: seen.append("norm"))
    linear.register_forward_hook(lambda *_: seen.append("forward"))
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    nn.utils.weight_norm(module.blocks[1][3])
    plugin = FP8Precision(backend="te", keep_bf16=["lm_head"], fallback="error")
    trainer(tmp_path, plugin, 1, accelerator="gpu", enable_checkpointing=False).fit(module, texts())
    assert plugin.converted == ["blocks.0.1", "blocks.0.3", "blocks.1.1"]
    steps = len(module.losses)
    assert {name: seen.count(name) for name in seen} == {"norm": steps, "forward": steps, "backward": steps}
    assert "blocks.1.3.weight" not in module.state_dict()
