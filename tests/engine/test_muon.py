"""Muon beside AdamW: torch's own arithmetic, which parameters it has, and skipped updates."""

import copy
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.compat.torch_private import skip_where
from gpt2_fp8.config.schema import MuonOptimizer
from gpt2_fp8.engine.optim import MuonAdamW, build_optimizer
from tests.common import CONFIG, OPTIM, build

CHOICE = MuonOptimizer(name="muon", matrix_lr=None, momentum=0.95, ns_steps=5)


def fill(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def of_one(matrix, rows=None, **settings):
    """Over one matrix, and one other parameter that has no gradient."""
    other = torch.nn.Parameter(torch.ones(2))
    adamw = torch.optim.AdamW([{"params": []}, {"params": [other]}], fused=True)
    wanted = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "steps": 5} | settings
    return MuonAdamW(adamw, [matrix], {} if rows is None else {matrix: rows}, **wanted)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)])
def test_a_matrix_is_updated_as_torchs_muon_does_bit_for_bit(shape):
    generator = torch.Generator().manual_seed(1)
    ours = torch.nn.Parameter(torch.randn(shape, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    one = of_one(ours)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        one.step()
        other.step()
        assert torch.equal(ours, theirs)
        assert torch.equal(one.state[ours]["momentum_buffer"], other.state[theirs]["momentum_buffer"])


def test_each_matrix_of_a_packed_weight_is_made_orthogonal_by_itself():
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(32 + 16 + 16, 32, generator=generator)
    gradient = torch.randn(start.shape, generator=generator)
    gradient[32:48] *= 100  # as one matrix, the large part would leave the others little
    packed = torch.nn.Parameter(start.clone())
    packed.grad = gradient.clone()
    of_one(packed, rows=(32, 16, 16)).step()
    for part in (slice(0, 32), slice(32, 48), slice(48, 64)):
        alone = torch.nn.Parameter(start[part].clone())
        alone.grad = gradient[part].clone()
        of_one(alone).step()
        assert torch.equal(packed[part], alone)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("tied_head", [True, False])
def test_the_matrices_of_the_blocks_are_muons_and_nothing_else(mlp, tied_head):
    model = build(replace(CONFIG, mlp=mlp, tied_head=tied_head, n_kv_head=2))
    optimizer = build_optimizer(model, OPTIM, CHOICE)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain, matrices = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    kinds = ("qkv.weight", "projection.weight", "mlp.fc1_weight", "mlp.fc2_weight")
    assert matrices == sorted(f"blocks.{i}.{kind}" for i in range(2) for kind in kinds)
    assert decayed == (
        ["positions.weight", "tokens.weight"] if tied_head else ["head.weight", "positions.weight", "tokens.weight"]
    )
    assert sorted(decayed + plain + matrices) == sorted(names.values())
    rows = {names[id(p)]: rows for p, rows in optimizer._rows.items()}
    assert rows["blocks.0.qkv.weight"] == (32, 16, 16)
    assert rows["blocks.1.mlp.fc1_weight"] == ((128,) if mlp == "gelu" else (128, 128))
    assert rows["blocks.1.projection.weight"] == rows["blocks.0.mlp.fc2_weight"] == (32,)


def test_rates_are_the_users():
    model = build()
    assert [group["lr"] for group in build_optimizer(model, OPTIM, CHOICE).param_groups] == [OPTIM.lr] * 3
    own = build_optimizer(model, OPTIM, replace(CHOICE, matrix_lr=0.5)).param_groups
    assert [group["lr"] for group in own] == [OPTIM.lr, OPTIM.lr, 0.5]
    assert [group["weight_decay"] for group in own] == [0.1, 0.0, 0.1]


def test_the_other_parameters_are_updated_as_by_torchs_adamw():
    ours, theirs = build(), build()
    one, other = build_optimizer(ours, OPTIM, CHOICE), build_optimizer(theirs, OPTIM)
    for seed in range(3):
        for model, optimizer in ((ours, one), (theirs, other)):
            fill(model, seed)
            optimizer.step()
    for name, parameter in ours.named_parameters():
        same = torch.equal(parameter, theirs.get_parameter(name))
        assert same != (name.startswith("blocks.") and parameter.dim() == 2), name


@pytest.mark.parametrize("after", [0, 2])
def test_a_skipped_update_changes_nothing_and_leaves_no_trace(after):
    plain, skipping = build(), build()
    one, other = build_optimizer(plain, OPTIM, CHOICE), build_optimizer(skipping, OPTIM, CHOICE)
    for seed in range(4):
        fill(plain, seed)
        one.step()
        if seed == after:
            before = copy.deepcopy(skipping.state_dict())
            fill(skipping)
            for parameter in skipping.parameters():
                parameter.grad[..., 0] = float("inf")
            skip_where(other, torch.ones(()))
            other.step()
            assert all(torch.equal(tensor, before[name]) for name, tensor in skipping.state_dict().items())
            skip_where(other, torch.zeros(()))
        fill(skipping, seed)
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), skipping.parameters(), strict=True))
    for a, b in zip(plain.parameters(), skipping.parameters(), strict=True):
        assert all(torch.equal(tensor, other.state[b][name]) for name, tensor in one.state[a].items())
