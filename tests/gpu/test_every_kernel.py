"""What every kernel that writes FP8 does alike: the same bytes again, an amax that is raised, CUDA graphs, streams."""

import pytest
import torch

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.product import Operands, product_gelu, product_gelu_backward
from tests.gpu.kernels import (
    DEVICE,
    assert_repeats,
    bits,
    cast_transpose,
    gelu_backward_cast,
    gelu_cast,
    layer_norm_backward,
    layer_norm_cast,
    normal,
    slot_of,
    use,
)
from tests.gpu.test_gemm import operands as normal_operands

pytestmark = pytest.mark.fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH, TRITON = ["cast", "layer_norm_forward", "layer_norm_backward"], ["gelu_forward", "gelu_backward"]
PRODUCTS = ["product_gelu", "product_gelu_backward"]  # in CUDA C++, for Hopper
CASES = [(name, how, dtype) for name in BOTH for how in ("cuda", "triton") for dtype in (E4M3, E5M2)]
CASES += [(name, "triton", dtype) for name in TRITON for dtype in (E4M3, E5M2)]
CASES += [("product_gelu", "cuda", E4M3), ("product_gelu_backward", "cuda", E5M2)]
every = pytest.mark.parametrize(("name", "how", "dtype"), CASES, ids=str)


@pytest.fixture(autouse=True)
def _implementation(how, name, monkeypatch):
    use(how, monkeypatch)
    if name in PRODUCTS and (torch.cuda.get_device_capability() != (9, 0) or nvrtc.missing()):
        pytest.skip("made for Hopper, in CUDA C++")


def made(name, seed=0):
    """The inputs of a kernel, and its call: of them and a slot."""
    if name in PRODUCTS:
        a, b, _, *units = normal_operands(
            448, 3072, 768, (E5M2 if name.endswith("backward") else E4M3, E4M3), seed=seed
        )
        bias = normal(3072, seed=seed)
        slopes = torch.randint(0, 255, (448, 3072), generator=torch.Generator().manual_seed(seed)).to(DEVICE).byte()
        if name == "product_gelu":
            return [a, b, bias], lambda a, b, bias, slot: product_gelu(Operands(a, b, *units), bias, slot)
        return [a, b, slopes], lambda a, b, slopes, slot: product_gelu_backward(Operands(a, b, *units), slopes, slot)
    x, dy, residual = (normal(272, 768, seed=3 * seed + i) for i in range(3))
    weight, bias = normal(768, seed=7, dtype=torch.float32), normal(768, seed=8, dtype=torch.float32)
    other = slot_of(E4M3)  # made here: a graph cannot record that

    def forward(x, slot):
        q, qt, statistics = layer_norm_cast(x, weight, bias, 1e-5, slot)
        return [q, qt, *statistics]

    def backward(dy, x, residual, slot):
        _, _, statistics = layer_norm_cast(x, weight, bias, 1e-5, other)
        return layer_norm_backward(dy, x, statistics, weight, residual, slot)

    return {
        "cast": ([x], lambda x, slot: cast_transpose(x, slot, sums=True)),
        "layer_norm_forward": ([x], forward),
        "layer_norm_backward": ([dy, x, residual], backward),
        "gelu_forward": ([x], lambda h, slot: [gelu_cast(h, slot)]),
        "gelu_backward": ([dy, x], lambda dy, h, slot: gelu_backward_cast(dy, h, slot, other)),
    }[name]


@every
def test_it_repeats_and_its_amax_is_raised_and_not_replaced(name, how, dtype):
    inputs, call = made(name)
    assert_repeats(lambda slot: call(*inputs, slot), dtype)
    fresh, small, large = slot_of(dtype), slot_of(dtype, amax=1e-6), slot_of(dtype, amax=1e6)
    for slot in (fresh, small, large):
        call(*inputs, slot)
    assert small.amax.item() == fresh.amax.item() > 1e-3
    assert large.amax.item() == 1e6


@every
def test_a_graphs_replay_and_another_stream_give_the_same(name, how, dtype):
    inputs, call = made(name)
    slot, stream = slot_of(dtype, 8.0), torch.cuda.Stream()
    call(*inputs, slot)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call(*inputs, slot)
    for ours, others in zip(inputs, made(name, seed=1)[0], strict=True):
        ours.copy_(others)
    eager = [tensor.clone() for tensor in call(*inputs, slot_of(dtype, 8.0))]
    graph.replay()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        elsewhere = call(*inputs, slot_of(dtype, 8.0))
    stream.synchronize()
    for one, other, third in zip(eager, replayed, elsewhere, strict=True):
        assert torch.equal(bits(one), bits(other))
        assert torch.equal(bits(one), bits(third))
