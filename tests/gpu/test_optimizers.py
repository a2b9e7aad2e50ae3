"""The update of small moments in Triton: plain torch's bits, skipped updates, and runs that resume exactly."""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8.compat.torch_private import MUON_COEFFICIENTS, orthogonalize, skip_where
from gpt2_fp8.engine.optim import build_optimizer
from gpt2_fp8.engine.small_adamw import Keys, SmallAdamW, update_plain
from tests.common import OPTIM
from tests.common import build as small_model
from tests.gpu.common import RUN
from tests.model.test_parameters import CHOICES
from tests.runs import assert_same_checkpoint, checkpoint, train, train_until

SHAPES = [(255,), (300, 1024), (257, 129)]


def optimizer_of(parameter):
    group = {"params": [parameter], "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return SmallAdamW([group], {parameter: Keys.of(7, "weight")})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_plain_torchs_bits(monkeypatch, shape, device):
    """On a CPU, and by torch's own kernels on the GPU."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.cuda()), torch.nn.Parameter(start.to(device))
    one, other = optimizer_of(ours), optimizer_of(theirs)
    for update in range(6):
        gradient = torch.randn(shape, generator=generator) * 10.0 ** -(update % 3)
        ours.grad, theirs.grad = gradient.cuda(), gradient.to(device)
        one.step()
        with monkeypatch.context() as patch:
            if device == "cuda":  # in place of the kernel
                plain = lambda p, g, state, keys, scalars, skip, first: update_plain(p, g, state, keys, scalars)  # noqa: E731
                patch.setattr("gpt2_fp8.kernels.adamw.update", plain)
            other.step()
        assert torch.equal(ours.cpu(), theirs.cpu())
        for name, tensor in one.state[ours].items():
            assert torch.equal(tensor.cpu(), other.state[theirs][name].cpu()), name


def iterate_in_float64(matrix):
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.mT
        a, b, c = MUON_COEFFICIENTS
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize(
    "shape", [(3, 768, 768), (2, 256, 1024), (2, 1024, 256), (2, 200, 328), (8, 16, 48), (1, 1600, 6400)]
)
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])
def test_newton_schulz_by_halves_errs_like_torchs(shape, scale):
    """Beside float64, less than one rounding to bfloat16 more; for singular values alike and from 1 to 1/1000."""
    from gpt2_fp8.kernels.newton_schulz import orthogonalize_batch

    generator = torch.Generator("cuda").manual_seed(1)
    matrices = torch.randn(shape, device="cuda", generator=generator)
    for steep in (1.0, torch.logspace(0, -3, shape[2], device="cuda")):
        batch = (matrices * steep * scale).bfloat16()
        wanted = [iterate_in_float64(matrix) for matrix in batch]
        theirs = [orthogonalize(matrix, 5) for matrix in batch]
        errors = [
            sum((one - exact).norm() / exact.norm() for one, exact in zip(found, wanted, strict=True)) / len(batch)
            for found in (orthogonalize_batch(batch, 5), theirs)
        ]
        assert errors[0] <= errors[1] + 2**-8
    zero = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(orthogonalize_batch(zero, 5), zero)


def test_muon_in_batches_is_muon_one_by_one():
    """Momenta to a last bit. Newton-Schulz makes small singular values 400 times larger, and the rounding in them."""
    choice = next(choice for choice in CHOICES if choice.name == "muon")
    settings = replace(OPTIM, lr=0.05, weight_decay=4.0)  # so that decay alone moves weights by a fifth
    models = [small_model().cuda() for _ in range(2)]
    start = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
    batched, single = (build_optimizer(model, settings, choice) for model in models)
    single._update_together = lambda own, group: own
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(3):
        for name, parameter in models[0].named_parameters():
            parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator)
            models[1].get_parameter(name).grad = parameter.grad.clone()
        batched.step()
        single.step()
    for name, parameter in models[0].named_parameters():
        other = models[1].get_parameter(name)
        for key, tensor in batched.state[parameter].items():
            torch.testing.assert_close(tensor, single.state[other][key], rtol=1e-6, atol=1e-8)
        one, by_one = parameter - start[name], other - start[name]
        assert (one - by_one).norm() <= 0.05 * by_one.norm(), name


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_a_skipped_update_changes_nothing_and_the_host_does_not_wait(choice):
    model = small_model().cuda()
    optimizer = build_optimizer(model, OPTIM, choice, seed=3)
    skip = torch.zeros((), device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)

    def step(spoil=1.0, checked="error"):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator) * spoil
        skip_where(optimizer, skip)
        torch.cuda.set_sync_debug_mode(checked)
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    step(checked="default")  # tables are copied to the GPU once
    step()
    before = [tensor.clone() for tensor in tensors(model, optimizer)]
    skip.fill_(1)
    step(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(model, optimizer), strict=True))
    skip.fill_(0)
    step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=False))
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors(model, optimizer))


def tensors(model, optimizer):
    return [*model.parameters(), *(tensor for state in optimizer.state.values() for tensor in state.values())]


def test_a_run_resumes_exactly(tmp_path):
    words = [
        "optimizer=adamw_bf16", "precision=bf16", "compile=false", "trainer.deterministic=true", "trainer.max_steps=6",
        "callbacks.checkpoint_every_n_steps=3", "data.val_sequences=0", "callbacks.sample_tokens=0",
    ]  # fmt: skip
    base = [word for word in RUN if not word.startswith(("precision.", "trainer.max_steps"))]
    train(tmp_path / "whole", *words, base=base)
    train_until(3, tmp_path / "legs", *words, base=base)
    train(tmp_path / "legs", *words, "ckpt_path=last", base=base)
    assert_same_checkpoint(checkpoint(tmp_path / "whole", 6), checkpoint(tmp_path / "legs", 6))
