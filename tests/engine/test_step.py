import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.engine.exchange import Exchange
from gpt2_fp8.engine.optim import build_optimizer
from gpt2_fp8.engine.step import accumulate, update
from tests.common import OPTIM, build, ids, loss_of


def gradients(micro_batch_size, batch):
    model = build()
    loss = accumulate(batch, micro_batch_size, loss_of(model), nullcontext, torch.Tensor.backward)
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_micro_batches_give_the_gradient_of_the_whole(micro_batch_size):
    loss, expected = gradients(8, ids())
    got_loss, got = gradients(micro_batch_size, ids())
    torch.testing.assert_close(got_loss, loss)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-7)


def one_update(spoil=None, max_grad_norm=1.0, spoil_loss=1.0):
    model = build()
    optimizer = build_optimizer(model, OPTIM)
    loss = accumulate(ids(), 8, loss_of(model), nullcontext, torch.Tensor.backward)
    if spoil is not None:
        model.positions.weight.grad[0, 0] = spoil
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = update(optimizer, optimizer.step, Exchange(model.parameters()), loss * spoil_loss, max_grad_norm)
    changed = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    return model, optimizer, result, changed


def test_update_changes_every_parameter_and_clears_gradients():
    model, _, result, changed = one_update()
    assert changed == {name for name, _ in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    assert not result.read().skipped
    assert result.read().grad_norm > 0


@pytest.mark.parametrize(("spoil", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (None, math.nan)])
def test_a_step_that_is_not_finite_changes_nothing(spoil, loss):
    _, optimizer, result, changed = one_update(spoil, spoil_loss=loss)
    assert changed == set()
    assert result.read().skipped
    assert math.isfinite(result.read().grad_norm) == (spoil is None)
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert all(torch.count_nonzero(state["exp_avg"]) == 0 for state in optimizer.state.values())


def test_the_verdict_is_of_the_loss_and_of_the_gradients():
    model = build()
    loss = accumulate(ids(), 8, loss_of(model), nullcontext, torch.Tensor.backward).item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=True).item()
    _, _, good, _ = one_update(max_grad_norm=norm / 2)
    assert good.read() == (loss, False, 0, norm, pytest.approx(0.5, rel=1e-4), None)
    assert good.first is None
    assert one_update(max_grad_norm=1e6)[2].read().clip_ratio == 1
    _, _, bad, _ = one_update(float("nan"))
    assert bad.read()[:3] == (loss, True, 0)
    assert math.isnan(bad.read().grad_norm)


def test_the_verdict_says_how_many_magnitudes_have_jumped():
    model = build()
    optimizer = build_optimizer(model, OPTIM)
    loss = accumulate(ids(), 8, loss_of(model), nullcontext, torch.Tensor.backward)
    result = update(optimizer, optimizer.step, Exchange(model.parameters()), loss, 1.0, torch.tensor(3.0))
    assert result.read()[:3] == (loss.item(), False, 3)


def test_the_step_after_a_skipped_one_is_taken():
    model, optimizer, _, _ = one_update(float("nan"))
    loss = accumulate(ids(), 8, loss_of(model), nullcontext, torch.Tensor.backward)
    before = model.tokens.weight.detach().clone()
    assert not update(optimizer, optimizer.step, Exchange(model.parameters()), loss, 1.0).read().skipped
    assert not torch.equal(before, model.tokens.weight)


def test_only_matrices_decay_and_adamw_has_the_numbers_of_the_settings():
    model = build()
    optimizer = build_optimizer(model, replace(OPTIM, lr=3e-4, beta1=0.8, beta2=0.97, eps=1e-7))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[1]["weight_decay"]) == (0.1, 0.0)
    assert all(name.endswith("weight") and "layer_norm" not in name for name in decayed)
    assert all("bias" in name or "layer_norm" in name for name in plain)
    assert sorted(decayed + plain) == sorted(names.values())
    assert decayed == sorted(decayed)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.97), 1e-7)
