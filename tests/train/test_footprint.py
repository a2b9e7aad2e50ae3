"""The estimate of a block's memory, against what autograd keeps."""

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.train.footprint import KEPT_BYTES, _kept_channels, footprint
from tests.common import CONFIG, build
from tests.model.options import OPTIONS, configured


@pytest.mark.parametrize("name", ["none", *OPTIONS])
def test_a_block_keeps_no_more_than_is_estimated(name):
    config = configured(name, n_embd=64, n_positions=64) if name != "none" else CONFIG
    model, kept = build(config), {}
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    x = torch.randn(8, config.n_positions, config.n_embd, requires_grad=True)
    rotation = model._rotation(torch.zeros(8, config.n_positions))
    known.add(x.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model.blocks[0](x, None, *rotation)
    assert y.requires_grad
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimated = 8 * config.n_positions * KEPT_BYTES * sum(_kept_channels(block_spec(config)))
    assert 0.6 * estimated < held <= estimated


def test_the_estimate_follows_what_is_computed_again():
    """The shape was measured, with `full` 1,274 MiB at its peak: two steps of a run, by `ru_maxrss`."""
    shape = ["trainer=cpu", "precision=fp32", "model.n_layer=12", "model.n_embd=256", "model.n_positions=512"]
    estimates = {}
    for choice in ("none", "mlp", "full"):
        (config,) = compose.preflight([*shape, "micro_batch_size=16", f"activation_checkpointing={choice}"])
        estimates[choice] = footprint(config, 257)
    assert 1274 << 20 < estimates["full"].of(16) < 1.5 * (1274 << 20)
    assert estimates["full"].least(16) < 1274 << 20
    assert estimates["full"].of(16) < estimates["mlp"].of(16) < estimates["none"].of(16)
