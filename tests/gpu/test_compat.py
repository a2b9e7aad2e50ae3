"""What `compat` expects of Transformer Engine, FlashAttention 4 and torch's CUDA part."""

import inspect
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.compat import flash_attn, torch_private, transformer_engine
from gpt2_fp8.fp8 import state
from tests.gpu.common import calibrated, gradients, tokens


def packed(tokens=256, heads=2, size=64):
    """Queries, keys and values: bfloat16 [batch, heads, tokens, head size]."""
    torch.manual_seed(0)
    return [torch.randn(2, heads, tokens, size, dtype=torch.bfloat16, device="cuda") for _ in range(3)]


def row_sums(q, k):
    """The natural logarithm of each row's sum of exponentials, float32 [batch, heads, tokens]."""
    scores = (q.float() @ k.float().mT) / q.shape[-1] ** 0.5
    masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(masked, -torch.inf).logsumexp(-1)


def test_the_raw_stream_is_the_current_ones_address():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch_private.current_raw_stream(side.device_index) == side.cuda_stream
    assert torch_private.current_raw_stream(side.device_index) != side.cuda_stream


def test_a_mark_has_its_name_in_a_profile():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch_private.mark_on_gpu()
        torch.cuda.synchronize()
    assert [torch_private.MARK in event.key for event in profile.key_averages() if "kernel" in event.key] == [True]


def test_cudnn_attention_gives_the_rows_sums():
    q, k, v = packed()
    out, lse = torch_private.cudnn_attention(q, k, v)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.view(lse.shape[:3]), row_sums(q, k), rtol=1e-3, atol=1e-3)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(flash_attn.why_no_flash() is not None, reason=str(flash_attn.why_no_flash()))
def test_flash_backward_takes_another_kernels_row_sums_and_writes_into_what_it_is_given():
    backward = flash_attn.flash_backward()
    used = {"q", "k", "v", "out", "dout", "lse", "causal", "deterministic", "dq", "dk", "dv"}
    assert set(inspect.signature(backward).parameters) >= used
    q, k, v = packed()
    out, lse = torch_private.cudnn_attention(q, k, v)
    dout = torch.randn_like(out)
    given = [t.transpose(1, 2).contiguous() for t in (q, k, v, out, dout)]
    grads = {name: torch.empty_like(given[0]) for name in ("dq", "dk", "dv")}
    backward(*given, lse.view(lse.shape[:3]), causal=True, deterministic=False, **grads)
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*leaves, is_causal=True).backward(dout.float())
    for found, leaf in zip(grads.values(), leaves, strict=True):
        torch.testing.assert_close(found.transpose(1, 2).float(), leaf.grad, rtol=5e-2, atol=5e-2)


def region(**recipe):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    return te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4, **recipe))


def layer():
    import transformer_engine.pytorch as te

    return te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")


@pytest.mark.fp8
def test_a_layers_scaling_state_is_there_after_its_first_forward():
    linear, x = layer(), torch.randn(32, 64, dtype=torch.bfloat16, device="cuda")
    assert transformer_engine.scaling_state(linear, "scaling_fwd") is None
    with region():
        out = linear(x)
    out.sum().backward()
    for direction, n in (("scaling_fwd", 3), ("scaling_bwd", 2)):
        state = transformer_engine.scaling_state(linear, direction)
        assert (state.scale.shape, state.scale.dtype) == ((n,), torch.float32)
        assert (state.amax_history.shape, state.amax_history.dtype) == ((4, n), torch.float32)
    seen = transformer_engine.scaling_state(linear, "scaling_fwd").amax_history
    assert seen[:, 0].max() == x.abs().max(), "of the input"
    assert transformer_engine.scaling_state(torch.nn.Linear(2, 2), "scaling_fwd") is None


@pytest.mark.fp8
def test_allocate_scaling_makes_the_state_that_a_forward_would_and_keeps_one_that_is_there():
    linear = layer()
    with region():
        transformer_engine.allocate_scaling(linear, 1, nullcontext())
    state = transformer_engine.scaling_state(linear, "scaling_fwd")
    assert state.scale.shape == (3,)
    state.scale.fill_(8.0)
    with region():
        transformer_engine.allocate_scaling(linear, 1, nullcontext())
        linear(torch.ones(32, 64, dtype=torch.bfloat16, device="cuda"))
    assert transformer_engine.scaling_state(linear, "scaling_fwd") is state, "the forward has taken it"


@pytest.mark.fp8
def test_entered_recipe_is_the_innermost_regions():
    import transformer_engine.pytorch as te

    assert transformer_engine.entered_recipe() is None
    with region(margin=3):
        assert transformer_engine.entered_recipe().margin == 3
        with te.autocast(enabled=False):
            assert transformer_engine.entered_recipe() is None
    assert transformer_engine.entered_recipe() is None


@pytest.mark.fp8
def test_split_along_dim_gives_parts_and_a_packed_gradient():
    x = torch.randn(2, 8, 3, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    parts = transformer_engine.split_along_dim().apply(x, 2, [1, 1, 1])
    assert all(torch.equal(part, x[:, :, i : i + 1]) for i, part in enumerate(parts))
    gradient = torch.randn_like(x)
    torch.autograd.backward(parts, [gradient[:, :, i : i + 1] for i in range(3)])
    assert torch.equal(x.grad, gradient)


@pytest.mark.fp8
def test_apply_rotary_turns_pairs_of_the_two_halves():
    x = torch.randn(2, 8, 3, 64, dtype=torch.float32, device="cuda")
    angle = torch.rand(8, 32, device="cuda")
    both = torch.cat((angle, angle), dim=-1)[:, None, None]
    turned = transformer_engine.apply_rotary()(x, both, tensor_format="bshd", fused=True)
    expected = torch.complex(x[..., :32], x[..., 32:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    assert torch.allclose(turned, torch.cat((expected.real, expected.imag), dim=-1), atol=1e-5)


@pytest.mark.fp8
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_forward_that_is_computed_twice_counts_once(recipe):
    """`computed_twice`, around each of three blocks: losses are equal, and so is the state of delayed scaling."""
    found = []
    for recompute in ("none", "full"):
        ids = tokens(4)
        model, fp8 = calibrated("te", recipe, recompute=recompute, ids=ids)
        losses = [gradients(model, ids, True, fp8.forward_context)[0] for _ in range(3)]
        found.append((losses, state.capture(model)))
        transformer_engine.reset()
    (losses, kept), (again, twice) = found
    assert losses[0] == again[0]
    assert losses == pytest.approx(again, rel=1e-4)
    assert bool(kept) == (recipe == "delayed")
    for name, tensor in kept.items():
        assert torch.equal(tensor == 0, twice[name] == 0), f"{name}: rows of the history that were not written"
        torch.testing.assert_close(twice[name], tensor, rtol=0.02, atol=0, msg=name)


@pytest.mark.fp8
def test_unfinished_passes_are_forgotten_and_the_region_is_put_back():
    from transformer_engine.pytorch.distributed import activation_recompute_forward as Phase
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    forget = transformer_engine.unfinished_passes()
    Manager.quantization_state.fp8_enabled = True  # as an error in the midst of a backward leaves it
    Manager.quantization_state.fp8_tensors_recompute_buffer.append(["scales"])
    Phase._is_first_fp8_module.append(True)
    assert Manager.is_fp8_enabled()
    try:
        forget()
        assert not Manager.is_fp8_enabled()
        assert not any(Manager.quantization_state.fp8_tensors_recompute_buffer)
        assert not Phase._is_first_fp8_module
    finally:
        transformer_engine.reset()
    assert not Manager.quantization_state.fp8_tensors_recompute_buffer, "reset forgets the queues themselves"
