"""What the tests of kernels share: the kernels themselves, shapes and numbers, and how FP8 is held to float64.

A kernel in Triton is imported when it is called, so that its tests are collected where there is no Triton.
"""

from importlib import import_module

import pytest
import torch

from gpt2_fp8.kernels.formats import LARGEST, Slot

WHERE = {
    "activation": "activation_backward_cast activation_cast",
    "cast": "cast_transpose empty_pair reduce_columns",
    "cross_entropy": "fused_cross_entropy",
    "embedding": "embed embedding_gradient positions_gradient",
    "layer_norm": "Statistics layer_norm_backward layer_norm_cast layer_norm_transposed",
    "probabilities": "choose_frequent compute_references probability_rows product_probabilities",
    "rotary": "prepare_heads prepare_heads_backward",
    "softmax_cast": "log_sums softmax_gradient_cast softmax_statistics",
    "target_rows": "add_target_rows target_rows",
}


def __getattr__(name):
    module = next((module for module, names in WHERE.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(name)
    return lambda *given, **more: getattr(import_module(f"gpt2_fp8.kernels.{module}"), name)(*given, **more)


DEVICE = "cuda"
E4M3, E5M2 = FORMATS = list(LARGEST)
KINDS = ["gelu", "relu_squared"]
SHAPES = [(128, 128), (256, 384), (16, 16), (48, 144), (80, 48), (272, 768), (16, 1600), (48, 2064)]
LARGE = [(2064, 4112), (4112, 4112)]  # a program handles two tiles, or four; the last one's lie partly outside
# as it is; so large that normal values saturate; small enough for subnormal numbers and zeros
SCALES = [1.0, 2.0**16, 2.0**-8, 2.0**-16]


def normal(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def large_normal(*shape, seed=0):
    """Standard normal bfloat16 values of a tensor of more elements than int32 counts, made on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    out = torch.empty(*shape, device=DEVICE, dtype=torch.bfloat16)
    for part in out.view(-1).split(2**26):
        part.copy_(torch.randn(len(part), device=DEVICE, generator=generator))
    return out


def need(gibibytes):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


def assert_slices_are_alone(call, slot, parts, transposed=(), atol=1e-2):
    """A call on all rows of large tensors leaves what calls on `parts` of them do, each of which counts its elements in
    int32, and which other tests hold to float64: the same bytes and amax, and column sums that add up. Returns it.

    `call(rows, slot)`: a call's tensors, and its column sums or None; those whose places in the list are `transposed`
    have the rows as columns.
    """
    of_parts, sums = slot._replace(amax=torch.zeros_like(slot.amax)), 0
    whole, of_whole = call(slice(None), slot)
    for part in parts:
        alone, of_part = call(part, of_parts)
        sums = sums + (0 if of_part is None else of_part)
        for i, (large, small) in enumerate(zip(whole, alone, strict=True)):
            large = large.view(torch.uint8) if large.element_size() == 1 else large
            here = large[:, part] if i in transposed else large[part]
            assert torch.equal(bits(here), bits(small)), (i, part)
    assert slot.amax.item() == of_parts.amax.item() > 0
    if of_whole is not None:
        torch.testing.assert_close(of_whole, sums, rtol=1e-5, atol=atol)
    return whole


def slot_of(dtype, scale=1.0, amax=0.0):
    return Slot(*(torch.tensor([value], device=DEVICE) for value in (scale, 1 / scale, amax)), dtype)


def to_fp8(exact, scale, dtype):
    """`exact` (float64) times `scale`, saturated and cast by torch."""
    return (exact * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def ordinal(q):
    """The place of each FP8 number among all of its format, int: neighbours differ by 1, and -0 is 0."""
    bits = q.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_transposed(q, qt):
    assert q.is_contiguous()
    assert qt.is_contiguous()
    assert torch.equal(qt.view(torch.uint8), q.view(torch.uint8).t())


def assert_fp8(q, exact, scale, noise, most=1e-3):
    """q is the cast of `exact` (float64) times `scale`, where arithmetic is off by at most `noise` (same shape or a
    number, before the scale). `noise` has to explain what is not torch's cast, and that is `most` of the numbers."""
    want = to_fp8(exact, scale, q.dtype)
    assert torch.equal(q.float().isnan(), want.float().isnan())
    got = ordinal(q)
    low, high = (ordinal(to_fp8(exact + sign * noise, scale, q.dtype)) for sign in (-1, 1))
    number = ~exact.isnan()
    assert torch.all((low <= got)[number])
    assert torch.all((got <= high)[number])
    assert (got != ordinal(want))[number].sum().item() <= max(2, exact.numel() * most)


def assert_written(slot, exact, noise, q, qt=None, rel=1e-5):
    """What a kernel leaves of `exact` in `slot`: its cast, the same transposed, and the amax."""
    assert_fp8(q, exact, slot.scale.double(), noise)
    if qt is not None:
        assert_transposed(q, qt)
    assert slot.amax.item() == pytest.approx(exact.abs().max().item(), rel=rel)


def column_sums(partial):
    out = torch.full(partial.shape[1:], float("nan"), device=DEVICE)
    __getattr__("reduce_columns")(partial, out, add=False)
    return out.double()


def bits(tensor):
    """The bytes of a tensor, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)
