"""The format of the head's gradient: E5M2 whatever the blocks' is, so that rare tokens are pushed down."""

import pytest
import torch

from gpt2_fp8.fp8.scaling import calibrate
from tests.gpu.common import FAMILIES, VOCAB, bf16, build, computing, gradients, loss_of, tokens
from tests.gpu.kernels import DEVICE, softmax_gradient_cast, softmax_statistics

pytestmark = pytest.mark.fp8


def zipf_logits(exponent, rows=64):
    """Logits [rows, 50,304] whose probabilities fall as a power of an id's rank, as a trained model's do."""
    ranks = torch.arange(1, VOCAB + 1, device=DEVICE).float()
    logits = torch.zeros(rows, 50304, device=DEVICE, dtype=torch.bfloat16)
    logits[:, :VOCAB] = -exponent * ranks.log()
    return logits


@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_80_no_id_of_a_zipf_row_goes_without_its_push_down(exponent):
    logits = zipf_logits(exponent)
    targets = torch.arange(len(logits), device=DEVICE)
    _, exponents = softmax_statistics(logits, targets, VOCAB)
    q, _ = softmax_gradient_cast(logits, targets, exponents, VOCAB)
    assert torch.all(q.float()[:, :VOCAB] != 0)
    in_e4m3 = (logits.float().softmax(1) * 2.0**8).to(torch.float8_e4m3fn).float()
    assert (in_e4m3[:, :VOCAB] == 0).float().mean() > 0.5, "what this guards from"


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("backend", FAMILIES)
def test_80_under_fp8_e4m3_rare_tokens_get_their_gradient(backend, recipe):
    """Of the embedding's rows whose ids are in no text: they get the head's gradient alone."""
    if backend == "fused" and recipe != "delayed":
        pytest.skip("the fused layers have one recipe")
    ids = tokens()
    model, fp8 = build(backend, precision="fp8_e4m3"), computing(backend, recipe=recipe, precision="fp8_e4m3")
    spread(model)
    calibrate(model, loss_of(model, True), ids, fp8.forward_context)
    _, ours = gradients(model, ids, True, fp8.forward_context)
    reference = build("te", precision="fp8_e4m3")
    reference.load_state_dict(model.state_dict())
    _, expected = gradients(reference, ids, True, bf16)
    absent = torch.ones(VOCAB, dtype=torch.bool, device=DEVICE)
    absent[ids.unique().long()] = False
    mine, theirs = (g["tokens.weight"][:VOCAB][absent] for g in (ours, expected))
    pushed = (theirs.norm(dim=1) > 0).float().mean().item()
    assert pushed > 0.99
    assert (mine.norm(dim=1) > 0).float().mean().item() > 0.99
    assert ((mine - theirs).norm() / theirs.norm()).item() < 0.25


@torch.no_grad()
def spread(model):
    """Give the ids probabilities that differ by orders of magnitude, through the last normalisation's bias."""
    model.head.layer_norm_bias.normal_(0, 6.0, generator=torch.Generator(DEVICE).manual_seed(3))
