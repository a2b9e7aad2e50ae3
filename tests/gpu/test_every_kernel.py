"""What all kernels do alike: the same bytes again, inputs that stay, an amax that is raised, CUDA graphs, streams."""

import pytest
import torch

from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.product import Operands, product_activation, product_activation_backward
from gpt2_fp8.kernels.weight_gradient import weight_gradient
from tests.gpu import (
    kernels,
    test_embedding,
    test_gemm,
    test_product_probabilities,
    test_softmax_cast,
    test_weight_gradient,
)
from tests.gpu.kernels import DEVICE, E4M3, E5M2, FORMATS, KINDS, bits, normal, slot_of
from tests.kernels.rotary_cases import Case

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels")]

OF_MLP = [f"product_{kind}{way}" for kind in KINDS for way in ("", "_backward")]
OTHERS = ["product_probabilities", "weight_gradient"]
PRODUCTS = OF_MLP + OTHERS
OF_ROWS = ["layer_norm", "rms_norm", *KINDS]
SLOTTED = ["cast", *(f"{name}_{way}" for name in OF_ROWS for way in ("forward", "backward"))]
CASES = [(name, dtype) for name in SLOTTED for dtype in FORMATS]
CASES += [(name, E5M2 if name.endswith("backward") else E4M3) for name in OF_MLP]
# torch sorts the ids of the two embeddings in two ways
EMBEDDINGS = ["embedding of 2 x 160", "embedding of 5 x 1024"]
CASES += [(name, None) for name in [*OTHERS, *EMBEDDINGS, "softmax", "gemm", "heads of 64", "heads of 80"]]
every = pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)


def made(name, seed=0):
    """The inputs of a kernel, and its call: of them and a slot."""
    if name in PRODUCTS or name == "gemm":
        return of_products(name, seed)
    if name.startswith("embedding"):
        return of_embedding(*map(int, name.split()[2::2]), seed)
    if name.startswith("heads"):
        return of_heads(int(name.split()[2]), seed)
    x, dy, residual = (normal(272, 768, seed=3 * seed + i) for i in range(3))
    weight, bias = normal(768, seed=7, dtype=torch.float32), normal(768, seed=8, dtype=torch.float32)
    kind, _, way = name.rpartition("_")
    bias = None if kind == "rms_norm" else bias
    other = slot_of(E4M3)  # made here: a graph cannot record that
    targets = test_softmax_cast.targets_of(272, 700).roll(seed)

    def forward(x, slot):
        q, qt, statistics = kernels.layer_norm_cast(x, weight, bias, 1e-5, slot)
        return [q, qt, *(tensor for tensor in statistics if tensor is not None)]

    def backward(dy, x, residual, slot):
        _, _, statistics = kernels.layer_norm_cast(x, weight, bias, 1e-5, other)
        dx, q, qt, sums = kernels.layer_norm_backward(dy, x, statistics, weight, residual, slot)
        return [dx, q, qt, sums if bias is not None else sums[:, ::2]]

    return {
        "cast": ([x], lambda x, slot: kernels.cast_transpose(x, slot, sums=True)),
        "norm_forward": ([x], forward),
        "norm_backward": ([dy, x, residual], backward),
        "activation_forward": ([x], lambda h, slot: [kernels.activation_cast(kind, h, slot)]),
        "activation_backward": (
            [dy, x],
            lambda dy, h, slot: kernels.activation_backward_cast(kind, dy, h, slot, other),
        ),
        "softmax": ([x, targets], lambda x, targets, slot: test_softmax_cast.compute(x, targets, 700)),
    }[f"activation_{way}" if kind in KINDS else f"norm_{way}" if kind.endswith("norm") else name]


def of_products(name, seed):
    """The same of kernels whose inputs are two matrices in FP8, and something more for some."""
    if name == "weight_gradient":
        a, bt, *units = test_weight_gradient.normal(test_weight_gradient.SMALL, (E5M2, E4M3), seed)
        return [a, bt], lambda a, bt, slot: twice(640, 384, weight_gradient, a, bt, *units)
    m, n, k = (192, 384, 256) if name in OTHERS else (448, 3072, 768)
    a, b, _, *units = test_gemm.operands(m, n, k, (E5M2 if name.endswith("backward") else E4M3, E4M3), seed=seed)
    bias, references = normal(n, seed=seed), torch.zeros(m, device=DEVICE)
    kind = "relu_squared" if "relu" in name else "gelu"
    # codes of GELU's slope, or numbers of E4M3 that are not negative and no NaN
    slopes = torch.randint(0, 127, (m, n), generator=torch.Generator().manual_seed(seed)).to(DEVICE).byte()
    slopes, z_scale_inv = slopes if kind == "gelu" else slopes.view(E4M3), torch.ones(1, device=DEVICE)
    targets = test_product_probabilities.targets_of(m, 300).roll(seed)

    def probabilities(of, targets, slot):  # without the targets' logits, which rows without a target have not
        return kernels.product_probabilities(of, references, targets, 300)[:3]

    more, call = {
        "gemm": ([], lambda of, slot: twice(m, n, matmul, *of)),
        f"product_{kind}": ([bias], lambda of, bias, slot: product_activation(kind, of, bias, slot)),
        f"product_{kind}_backward": (
            [slopes],
            lambda of, slopes, slot: product_activation_backward(kind, of, slopes, z_scale_inv, slot),
        ),
        "product_probabilities": ([targets], probabilities),
    }[name]
    return [a, b, *more], lambda a, b, *given: call(Operands(a, b, *units), *given)


def twice(rows, columns, product, a, b, *units):
    """What a product leaves that is added to a matrix twice."""
    out = torch.full((rows, columns), 3.0, device=DEVICE)
    for _ in range(2):
        product(a, b, out, *units, add=out)
    return [out]


def of_embedding(batch, tokens, seed):
    """The same of the embedding's forward and backward: of a text, of one token everywhere, of each one once."""
    vocabulary, columns = 6000, 272
    table, positions = (normal(rows, columns, seed=2, dtype=torch.float32) for rows in (vocabulary, tokens))
    ids = test_embedding.ids_of(("text", "equal", "different")[seed], batch, tokens, vocabulary, seed)

    def call(ids, dx, slot):
        of_table, of_positions = torch.ones_like(table), torch.ones_like(positions)
        kernels.embedding_gradient(dx, ids, of_table)
        kernels.positions_gradient(dx, of_positions, add=True)
        return [kernels.embed(ids, table, positions), of_table, of_positions]

    return [ids, normal(batch, tokens, columns, seed=seed)], call


def of_heads(size, seed):
    """The same of QK-norm and RoPE: forward, and backward where the gradients lie."""
    case = Case(3, 3, size, True, True, 2, 150, DEVICE, seed)
    fixed = Case(3, 3, size, True, True, 2, 150, DEVICE).given  # not a graph's inputs

    def call(packed, upstream, slot):
        gradient = upstream.clone()
        sums = kernels.prepare_heads_backward(*case.split(gradient)[:2], packed, gradient, *fixed)
        return [*kernels.prepare_heads(packed, 3, 3, *fixed), gradient, sums]

    return [case.packed, torch.cat(case.upstream, 2).flatten(2)], call


@every
def test_it_repeats_leaves_its_inputs_and_raises_its_amax(name, dtype):
    inputs, call = made(name)
    before = [tensor.clone() for tensor in inputs]
    slots = [slot_of(dtype or E4M3, amax=amax) for amax in (0.0, 1e-6, 1e6)]
    found = [call(*inputs, slot) for slot in slots]
    for others in found[1:]:
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found[0], others, strict=True))
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(inputs, before, strict=True))
    if dtype is not None:
        assert slots[0].amax.item() == slots[1].amax.item() > 1e-3
        assert slots[2].amax.item() == 1e6


@every
def test_a_graphs_replay_and_another_stream_give_the_same(name, dtype):
    dtype = dtype or E4M3
    inputs, call = made(name)
    slot, stream = slot_of(dtype, 8.0), torch.cuda.Stream()
    call(*inputs, slot)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call(*inputs, slot)
    for seed in (1, 2):
        for ours, others in zip(inputs, made(name, seed)[0], strict=True):
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
