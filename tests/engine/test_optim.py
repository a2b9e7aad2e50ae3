from dataclasses import replace

import torch

from gpt2_fp8.engine.optim import build_optimizer
from tests.common import OPTIM, build


def test_only_matrices_decay():
    model = build()
    optimizer = build_optimizer(model, OPTIM)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert all(name.endswith("weight") and "layer_norm" not in name for name in decayed)
    assert all("bias" in name or "layer_norm" in name for name in plain)
    assert sorted(decayed + plain) == sorted(names.values())
    assert decayed == sorted(decayed)


def test_adamw_has_the_numbers_of_the_settings():
    config = replace(OPTIM, lr=3e-4, beta1=0.8, beta2=0.97, eps=1e-7)
    optimizer = build_optimizer(build(), config)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.97), 1e-7)
