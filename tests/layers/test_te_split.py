"""The MLP of two modules, with the plain layers in Transformer Engine's place: names, numbers, and who owns what."""

import pytest
import torch

from gpt2_fp8.config.block_spec import MLP, Norm
from gpt2_fp8.config.kept_layers import MLP as BOTH
from gpt2_fp8.layers import reference, te

KINDS = [("gelu", "layer_norm", True), ("gelu", "layer_norm", False), ("swiglu", "rms_norm", False)]
KINDS += [("relu_squared", "rms_norm", False)]


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.setattr(te, "layer_norm_linear", reference.layer_norm_linear)
    monkeypatch.setattr(te, "linear", reference.linear)


def pair(kind, norm, bias):
    arguments = 16, MLP(kind, 32), Norm(norm, 1e-5), bias, BOTH, False
    ours, plain = te.split.layer_norm_mlp(*arguments), reference.layer_norm_mlp(*arguments)
    torch.manual_seed(0)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(plain.state_dict())
    return ours, plain


@pytest.mark.parametrize(("kind", "norm", "bias"), KINDS)
def test_names_and_numbers_are_the_plain_layers(kind, norm, bias):
    ours, plain = pair(kind, norm, bias)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    x = torch.randn(4, 16)
    assert torch.equal(ours(x), plain(x))
    ours(x).square().sum().backward()
    plain(x).square().sum().backward()
    theirs = dict(plain.named_parameters())
    assert all(torch.equal(p.grad, theirs[name].grad) for name, p in ours.named_parameters())
    # the layers compute with their owner's parameters, whatever becomes of these
    for changed in (lambda model: model.double(), lambda model: [p.data.mul_(2) for p in model.parameters()]):
        for model in (ours, plain):
            changed(model)
        x = torch.randn(4, 16, dtype=torch.float64)
        assert torch.equal(ours(x), plain(x))
    assert not list(ours.fc1.parameters())
    assert not list(ours.fc2.parameters())
