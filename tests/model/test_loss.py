"""The loss and its penalties against their formulas in float64, in every road that a CPU has."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.model.loss import NO_PENALTY, cross_entropy, loss_of, loss_parts, split, trained_loss
from tests.common import build as plain
from tests.common import ids

WEIGHTS = [{}, {"z_loss": 0.01}, {"z_loss": 0.7}, {"logit_l2": 0.3}, {"z_loss": 0.02, "logit_l2": 0.1}]
weights = pytest.mark.parametrize("given", WEIGHTS, ids=str)


def exact(logits, targets, vocab_size, given):
    """What is trained, the cross-entropy and the penalties of logits [rows, columns], each a mean over the targets."""
    kept = targets >= 0
    real = logits[kept][:, :vocab_size]
    loss = F.cross_entropy(real, targets[kept])
    z = torch.log(torch.exp(real).sum(1)).square().mean()
    amount = given.get("z_loss", 0) * z + given.get("logit_l2", 0) * real.square().mean()
    return torch.stack([loss + amount, loss, amount])


@weights
@pytest.mark.parametrize("spread", [1.0, 15.0])
def test_penalties_on_logits_are_the_formulas(given, spread):
    """Padded columns and ignored targets take no part, whatever stands there."""
    logits = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(1)) * spread
    logits[..., 57:] = 1e4
    targets = torch.randint(57, (4, 5))
    targets[1:3, ::2] = -1
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = cross_entropy(ours, targets, 57, fused=False, scale=0.25, penalty=PenaltyConfig(**given))
    want = 0.25 * exact(theirs.flatten(0, 1), targets.flatten(), 57, given)
    torch.testing.assert_close(got.double(), want if given else want[0], rtol=1e-5, atol=1e-6)
    trained_loss(got).backward()
    want[0].backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-7)
    assert torch.count_nonzero(ours.grad[..., 57:]) == torch.count_nonzero(ours.grad[targets < 0]) == 0


@weights
def test_all_ignored_is_zero(given):
    logits = torch.randn(1, 2, 64, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 2), -1), 64, fused=False, penalty=PenaltyConfig(**given))
    trained_loss(loss).backward()
    assert torch.count_nonzero(loss) == torch.count_nonzero(logits.grad) == 0


def test_without_penalties_the_loss_is_a_scalar_and_only_training_has_them():
    model, batch = plain(), ids()
    with torch.no_grad():
        alone = loss_of(model, batch, None, 1.0, False, PenaltyConfig(z_loss=1.0, activation_l1=1.0))
        assert alone.dim() == 0
        assert torch.equal(alone, loss_of(model, batch, None, 1.0, False, NO_PENALTY))
    assert loss_of(model, batch, None, 1.0, False, NO_PENALTY).dim() == 0
    loss = loss_of(model, batch, None, 1.0, False, PenaltyConfig(z_loss=1.0, activation_l1=1.0))
    assert torch.equal(loss[1], alone)
    torch.testing.assert_close(loss[0], loss[1] + loss[2])
    assert loss_parts(alone) == (alone, None)


def test_activations_are_the_outputs_of_every_block():
    model, batch = plain(), ids()
    batch[1, 3:] = -1
    _, targets = split(batch)
    outputs: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: outputs.append(out)) for block in model.blocks]
    loss = loss_of(model, batch, None, 0.5, False, PenaltyConfig(activation_l1=0.3))
    assert len(outputs) == len(model.blocks) > 1
    kept = targets >= 0
    want = 0.3 * torch.stack([out[kept].abs().mean() for out in outputs]).mean() * 0.5
    torch.testing.assert_close(loss[2], want)
    for hook in hooks:
        hook.remove()
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(loss[0], parameters, retain_graph=True)
    plainly = torch.autograd.grad(loss_of(model, batch, None, 0.5, False, NO_PENALTY), parameters)
    added = torch.autograd.grad(want, parameters, allow_unused=True)
    for one, other, more in zip(ours, plainly, added, strict=True):
        torch.testing.assert_close(one, other if more is None else other + more, rtol=1e-4, atol=1e-8)


@weights
def test_micro_batches_give_the_gradient_of_the_whole(given):
    model, penalty = plain(), PenaltyConfig(activation_l1=0.1, **given)
    batch = ids()
    whole = loss_of(model, batch, None, 1.0, False, penalty)
    trained_loss(whole).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = torch.zeros(3)
    for part in batch.split(1):
        loss = loss_of(model, part, None, 1 / len(batch), False, penalty)
        trained_loss(loss).backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.detach(), rtol=1e-5, atol=1e-6)
    for parameter, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-7)


def test_split_shifts_by_one_and_marks_padding():
    inputs, targets = split(torch.tensor([[5, 6, 7], [8, -1, -1]], dtype=torch.int32))
    assert inputs.tolist() == [[5, 6], [8, 0]]
    assert (targets.tolist(), targets.dtype) == ([[6, 7], [-1, -1]], torch.int64)
