"""The fused layers' attention with RoPE and QK-norm on a CPU: its kernels replaced by what they compute, in float64.

What is tested is where gradients go; tests/kernels and tests/gpu have the kernels.
"""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.config.block_spec import Heads, RoPE
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.reference import angles
from gpt2_fp8.model.parameters import parameters
from tests.common import CONFIG
from tests.layers.standins import SCALING, families

TOKENS, EPSILON = 160, 1e-2  # more tokens than go to torch's own kernels
ROPE = RoPE(100.0)
KERNELS = ["FlashAttention", "TEAttention", "Attention"]
CASES = [*itertools.product(KERNELS, (True, False), (True, False))]
CASES.remove(("TEAttention", False, False))  # its own split


def prepared(q, k, turns, norms):
    """What the kernel computes of queries and keys."""
    for i, x in enumerate((q, k)):
        x = torch.nn.functional.rms_norm(x, x.shape[3:], norms[i], EPSILON) if norms else x
        yield x if turns is None else reference.rotate(x, turns.angle)


def prepare_heads(packed, queries, keys, turns, norms, epsilon, values):
    assert epsilon == EPSILON
    q, k, v = packed.unflatten(2, (queries + 2 * keys, -1)).split([queries, keys, keys], 2)
    found = [*prepared(q, k, turns, norms), *([v] if values else [])]
    return torch.cat(found, 2).split([part.shape[2] for part in found], 2)


def prepare_heads_backward(dq, dk, packed, gradient, turns, norms, epsilon):
    """In place, as the kernel, if dq and dk are parts of the gradient."""
    heads = dq.shape[2], dk.shape[2], dk.shape[2]
    with torch.enable_grad():
        q, k, _ = (x.detach().requires_grad_() for x in packed.unflatten(2, (sum(heads), -1)).split(heads, 2))
        weights = [norm.detach().requires_grad_() for norm in norms]
        found = torch.autograd.grad(list(prepared(q, k, turns, weights)), [q, k, *weights], [dq, dk])
    for into, part in zip(gradient.unflatten(2, (sum(heads), -1)).split(heads, 2), found[:2], strict=False):
        into.copy_(part)
    return torch.stack(found[2:])[None].expand(3, -1, -1) / 3 if norms else None  # of three programs


def cudnn(q, k, v):
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(
        torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -math.inf
    )
    return scores.softmax(3) @ v, scores.logsumexp(3, keepdim=True)


def flash(q, k, v, out, dout, lse, causal, deterministic, dq, dk, dv):
    """It writes into the parts of one packed gradient that it is given."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        y = cudnn(*(x.transpose(1, 2) for x in inputs))[0].transpose(1, 2)
        found = torch.autograd.grad(y, inputs, dout)
    for into, part in zip((dq, dk, dv), found, strict=True):
        into.copy_(part)


class Packed(torch.nn.Module):
    """Transformer Engine's: parts of one tensor it takes as they are, and gives their gradients as parts of one."""

    def forward(self, q, k, v):
        for i, part in enumerate((q, k, v)):
            assert part.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
            assert (part.shape, part.stride(), part.storage_offset()) == (q.shape, q.stride(), i * q[0, 0].numel())
        return sys.modules["gpt2_fp8.layers.attention"]._FlashAttention.apply(q, k, v)


def built(module, kernel, heads):
    layer = getattr(module, kernel)(heads, 0.0, EPSILON)
    if kernel == "TEAttention":
        layer.kernel = Packed()
    return layer.double()


@pytest.fixture
def module(monkeypatch):
    with families():
        from gpt2_fp8.kernels import cast, rotary
        from gpt2_fp8.layers import attention

        monkeypatch.setattr(rotary, "prepare_heads", prepare_heads)
        monkeypatch.setattr(rotary, "prepare_heads_backward", prepare_heads_backward)
        monkeypatch.setattr(cast, "reduce_columns", lambda partial, out, add: out.copy_(partial.sum(0)))
        monkeypatch.setattr(attention, "cudnn_attention", cudnn)
        monkeypatch.setattr(attention, "flash_backward", lambda: flash)
        yield attention


def differentiated(layer, packed, angle):
    packed = packed.clone().requires_grad_()
    y = layer(packed, angle)
    return y, *torch.autograd.grad(y.square().sum(), [packed, *layer.parameters()])


@pytest.mark.parametrize("tokens", [TOKENS, 16])
@pytest.mark.parametrize(("kernel", "rope", "qk_norm"), CASES)
def test_it_is_the_reference_layers(module, kernel, rope, qk_norm, tokens):
    torch.manual_seed(0)
    heads = Heads(3, 3, 8, qk_norm)
    layers = built(module, kernel, heads), reference.Attention(heads, 0.0, EPSILON).double()
    for pair in zip(*(layer.parameters() for layer in layers), strict=True):
        values = torch.randn(8)
        for parameter in pair:
            parameter.data.copy_(values)
    from gpt2_fp8.kernels.rotary import Turns

    angle = angles(ROPE, 8, tokens, torch.device("cpu")) if rope else None
    packed = torch.randn(2, tokens, heads.packed, dtype=torch.float64)
    found = differentiated(layers[0], packed, Turns.of(angle) if rope else None)
    expected = differentiated(layers[1], packed, angle)
    assert [name for name, _ in layers[0].named_parameters()] == (["q_norm", "k_norm"] if qk_norm else [])
    assert len(found) == (4 if qk_norm else 2)
    for ours, theirs in zip(found, expected, strict=True):
        # sums of 480 rows; the norms' gradients are summed in float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_packed_gradient_is_not_copied(module, kernel, monkeypatch):
    """FlashAttention 4 and Transformer Engine write into it, and the kernel transforms it where it lies."""
    from gpt2_fp8.kernels import rotary

    seen, real = [], rotary.prepare_heads_backward

    def noted(dq, dk, packed, gradient, *more):
        seen.append((dq.data_ptr() == gradient.data_ptr(), gradient.data_ptr()))
        return real(dq, dk, packed, gradient, *more)

    monkeypatch.setattr(rotary, "prepare_heads_backward", noted)
    heads = Heads(3, 3, 8, qk_norm=True)
    layer = built(module, kernel, heads)
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    _, gradient, *_ = differentiated(layer, torch.randn(2, TOKENS, heads.packed, dtype=torch.float64), None)
    assert seen == [(kernel != "Attention", gradient.data_ptr())]


def test_blocks_are_given_what_their_family_makes_of_the_angles():
    """Once for all fused ones; a kept one is Transformer Engine's, and gets the angles."""
    with families():
        from gpt2_fp8.kernels.rotary import Turns
        from gpt2_fp8.layers.fused import Fused
        from gpt2_fp8.model.gpt2 import GPT2

        config = replace(
            CONFIG, n_layer=3, n_embd=32, n_head=2, positions="rope", norm="rms_norm", qk_norm=True, bias=False,
            tied_head=False,
        )  # fmt: skip
        model = GPT2(config, 64, Fused(SCALING, recompute="none"), keep_bf16=["first"])
        assert {name: p.shape for name, p in model.named_parameters()} == {
            p.name: p.shape for p in parameters(config, 64)
        }
        model._embed = lambda ids, tokens, positions: tokens[ids]
        given = []
        for block in model.blocks:
            block.forward = lambda x, first, turns: given.append(turns) or x
        model.eval()
        with torch.no_grad():
            model.hidden_states(torch.zeros(1, 5, dtype=torch.long))
        assert isinstance(given[0], torch.Tensor)
        assert isinstance(given[1], Turns)
        assert given[2] is given[1]
        assert given[1].angle is given[0]
        assert torch.equal(given[0], angles(model.spec.positions, 16, 5, torch.device("cpu")))
        assert given[1].cos.dtype == given[1].sin.dtype == torch.float32
        assert torch.equal(given[1].sin, given[0].sin().float())
