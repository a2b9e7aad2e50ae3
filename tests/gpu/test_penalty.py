"""Penalties on a GPU: in the loss kernels against float64, and in whole gradients against plain layers in float32."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu import kernels
from tests.gpu.common import error, grads, prepared, tokens
from tests.gpu.kernels import normal, softmax_gradient_cast, softmax_statistics
from tests.gpu.test_softmax_cast import assert_gradient, reference, targets_of

WEIGHTS = [(1e-2, 0.0), (0.0, 0.5), (0.3, 0.2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab_size", "columns"), [(7, 257, 320), (5, 8193, 8256), (33, 50257, 50304)])
@pytest.mark.parametrize(("z_loss", "logit_l2"), WEIGHTS)
def test_the_loss_kernel_matches_float64(rows, vocab_size, columns, dtype, z_loss, logit_l2):
    logits = (torch.randn(rows, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)) * 8).to(
        dtype
    )
    logits[:, vocab_size:] = float("nan")
    targets = targets_of(rows, vocab_size)
    counted = targets >= 0
    exact = logits.double()[:, :vocab_size].clone().requires_grad_()
    loss = F.cross_entropy(exact[counted], targets[counted])
    penalty = (z_loss * exact.logsumexp(1).square() + logit_l2 * exact.square().mean(1))[counted].mean()
    ((loss + penalty) * 2).backward()
    given = logits.clone().requires_grad_()
    got = kernels.fused_cross_entropy(given * 1, targets, vocab_size, 0.5, z_loss, logit_l2)
    (got[0] * 4).backward()
    want = 0.5 * torch.stack([loss + penalty, loss, penalty])
    torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-6)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-21 * (4 + exact.abs().max().item())
    torch.testing.assert_close(given.grad[:, :vocab_size].double(), exact.grad, rtol=rounding, atol=1e-7)
    assert torch.count_nonzero(given.grad[:, vocab_size:]) == torch.count_nonzero(given.grad[~counted]) == 0


@pytest.mark.fp8
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("z_loss", [1e-4, 0.02])
def test_the_fp8_gradient_matches_float64(z_loss):
    logits, targets = normal(144, 400) * 4, targets_of(144, 257)
    logits[:, 257:] = float("nan")
    _, exponents = softmax_statistics(logits, targets, 257)
    q, qt = softmax_gradient_cast(logits, targets, exponents, 257, z_loss)
    _, p, exact = reference(logits, targets, 257)
    lse = torch.where(targets >= 0, logits.double()[:, :257].logsumexp(1), 0.0)
    torch.testing.assert_close(kernels.log_sums(exponents).double(), lse, rtol=1e-6, atol=1e-5)
    more = 2 * z_loss * lse[:, None] * p
    assert_gradient(q, logits, p + more.abs(), exact + more)
    kernels.assert_transposed(q, qt)
    without, _ = softmax_gradient_cast(logits, targets, exponents, 257)
    assert not torch.equal(kernels.bits(q), kernels.bits(without))


LAYERS = {
    "plain": ["precision=bf16", "compile=false", "penalty.logit_l2=0.5", "penalty.activation_l1=0.5"],
    "te": ["precision.backend=te", "recipe=delayed", "penalty.logit_l2=0.5", "penalty.activation_l1=0.5"],
    "fused": ["precision.backend=fused", "cuda_graphs=false"],
    "fused, in graphs": ["precision.backend=fused", "cuda_graphs=true"],
    "fused, without logits": ["precision.backend=fused", "cuda_graphs=false"],
}


@pytest.mark.parametrize(
    "layers", [pytest.param(name, marks=[] if name == "plain" else [pytest.mark.fp8]) for name in LAYERS]
)
def test_gradients_are_those_of_plain_layers_in_float32(layers, monkeypatch):
    if layers == "fused, without logits":
        monkeypatch.setattr("gpt2_fp8.kernels.product.FEWEST_ROWS", 1)
    words = ["data.tokenizer=gpt2", "penalty.z_loss=0.01"]
    same = [word for word in LAYERS[layers] if word.startswith("penalty.")]
    found = []
    for more in (LAYERS[layers], [*same, "precision=fp32", "compile=false"]):
        engine = prepared(*words, *more)
        found.append((engine.of_step(tokens(12, 0, 128), engine.micro_batch_size), grads(engine.model)))
    (loss, gradients), (expected_loss, expected) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=1e-3)
    assert error(gradients, expected) < (0.05 if layers == "plain" else 0.15)
