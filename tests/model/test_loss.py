import torch
import torch.nn.functional as F

from gpt2_fp8.model.loss import cross_entropy, split


def test_padding_columns_and_ignored_targets_take_no_part():
    logits = torch.randn(2, 3, 64, requires_grad=True)
    targets = torch.tensor([[1, 2, -1], [-1, 56, 0]])
    loss = cross_entropy(logits, targets, 57, fused=False)
    kept = targets >= 0
    torch.testing.assert_close(loss, F.cross_entropy(logits[kept][:, :57], targets[kept]))
    loss.backward()
    assert torch.count_nonzero(logits.grad[..., 57:]) == 0
    assert torch.count_nonzero(logits.grad[~kept]) == 0


def test_all_ignored_is_zero_and_scale_scales():
    logits = torch.randn(1, 2, 64)
    assert cross_entropy(logits, torch.full((1, 2), -1), 64, fused=False) == 0
    targets = torch.tensor([[3, 4]])
    whole, quarter = (cross_entropy(logits, targets, 64, False, scale) for scale in (1.0, 0.25))
    torch.testing.assert_close(quarter, whole / 4)


def test_split_shifts_by_one_and_marks_padding():
    inputs, targets = split(torch.tensor([[5, 6, 7], [8, -1, -1]], dtype=torch.int32))
    assert inputs.tolist() == [[5, 6], [8, 0]]
    assert targets.tolist() == [[6, 7], [-1, -1]]
    assert targets.dtype == torch.int64
