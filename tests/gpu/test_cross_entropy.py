"""The fused loss against float64, on shapes and values that break kernels."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.kernels import fused_cross_entropy, large_normal, need


def reference(logits, targets, vocab_size):
    """Loss and gradient in float64; padding columns and ignored rows count for nothing."""
    exact = logits.double()[:, :vocab_size].requires_grad_()
    total = F.cross_entropy(exact, targets, ignore_index=-1, reduction="sum")
    loss = total / (targets >= 0).sum().clamp_min(1)
    loss.backward()
    gradient = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    gradient[:, :vocab_size] = exact.grad
    return loss.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "vocab_size", "columns"),
    [(1, 1, 64), (7, 257, 320), (33, 8192, 8192), (5, 8193, 8256), (64, 50257, 50304), (3, 65536, 65536)],
)
@pytest.mark.parametrize(("spread", "scale"), [(1.0, 1.0), (30.0, 0.25)])
def test_matches_float64(rows, vocab_size, columns, dtype, spread, scale):
    """`scale` is that of the loss and of the gradient."""
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = (torch.randn(rows, columns, device="cuda", generator=generator) * spread).to(dtype)
    targets = torch.randint(0, vocab_size, (rows,), device="cuda", generator=generator)
    targets[::3] = -1 if rows > 1 else targets[::3]
    loss, gradient = reference(logits, targets, vocab_size)
    given = logits.clone().requires_grad_()
    view = given * 1  # a leaf may not be overwritten
    got = fused_cross_entropy(view, targets, vocab_size, scale)
    (got * 4).backward()
    torch.testing.assert_close(got.double(), loss * scale, rtol=4e-6, atol=4e-6)
    # bf16: half a unit in the last place of what is stored. float32: the exponent's rounding, which grows with |x|.
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-22 * (4 + logits.abs().max().item())
    torch.testing.assert_close(given.grad.double(), 4 * scale * gradient, rtol=rounding, atol=1e-8)
    assert (torch.count_nonzero(given.grad[:, vocab_size:]), torch.count_nonzero(given.grad[targets < 0])) == (0, 0)


def test_extreme_values_stay_finite():
    logits = torch.zeros(4, 320, device="cuda", dtype=torch.bfloat16)
    logits[0] = 3e38
    logits[1] = -3e38
    logits[2, 5] = 1e4
    logits[3, :] = float("-inf")
    logits[3, 7] = 0.0
    targets = torch.tensor([0, 1, 5, 7], device="cuda")
    loss, _ = reference(logits, targets, 257)
    torch.testing.assert_close(fused_cross_entropy(logits.clone(), targets, 257).double(), loss, rtol=1e-5, atol=1e-5)


def test_a_nan_row_makes_the_loss_nan():
    logits = torch.randn(4, 320, device="cuda")
    logits[2, 100] = float("nan")
    assert torch.isnan(fused_cross_entropy(logits, torch.zeros(4, dtype=torch.long, device="cuda"), 257))


def test_all_ignored_is_zero():
    logits = torch.randn(4, 320, device="cuda", requires_grad=True)
    loss = fused_cross_entropy(logits * 1, torch.full((4,), -1, device="cuda"), 257)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.count_nonzero(logits.grad) == 0


def test_evaluation_leaves_the_logits_alone():
    logits = torch.randn(8, 320, device="cuda")
    before = logits.clone()
    fused_cross_entropy(logits, torch.zeros(8, dtype=torch.long, device="cuda"), 257)
    assert torch.equal(logits, before)


def test_more_elements_than_int32_counts():
    """A row beyond the 2^31st element is what it is alone; so is its gradient, scaled by the loss's."""
    need(24)
    rows, columns, vocab_size = 42752, 50304, 50257
    assert rows * columns > 2**31
    logits = large_normal(rows, columns)
    targets = torch.randint(vocab_size, (rows,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    targets[::3] = -1
    counted = (targets >= 0).sum()
    parts = [slice(0, 64), slice(rows // 2, rows // 2 + 64), slice(-64, None)]
    alone = [logits[part].clone().requires_grad_() for part in parts]
    for part, small in zip(parts, alone, strict=True):
        share = ((targets[part] >= 0).sum() / counted).item()
        (fused_cross_entropy(small * 1, targets[part], vocab_size, share) * 4).backward()
    given = logits.requires_grad_()
    view = given.view_as(given)  # a leaf may not be overwritten; here it may
    loss = fused_cross_entropy(view, targets, vocab_size)
    (loss * 4).backward()
    assert torch.isfinite(loss)
    for part, small in zip(parts, alone, strict=True):
        torch.testing.assert_close(given.grad[part], small.grad, rtol=2.0**-7, atol=1e-12)  # `share` is rounded
        assert torch.count_nonzero(given.grad[part][:, vocab_size:]) == 0
