"""A small call of each of our kernels, for `tests.gpu.sanitize`: shapes that end in the midst of a tile, and few
blocks, so that a block goes round its ring of buffers. What they compute is other tests' affair.

What they are given is made on the CPU: hardly a kernel runs here that is not ours.
"""

from __future__ import annotations

import itertools

import torch

from gpt2_fp8.kernels import (
    activation,
    cast,
    cross_entropy,
    embedding,
    layer_norm,
    nvrtc,
    probabilities,
    rotary,
    weight_gradient,
)
from gpt2_fp8.kernels.formats import Slot
from gpt2_fp8.kernels.gemm import PAIRS
from gpt2_fp8.kernels.product import Kind, Operands, fits, product_activation, product_activation_backward
from gpt2_fp8.kernels.softmax_cast import softmax_gradient_cast, softmax_statistics
from gpt2_fp8.kernels.target_rows import add_target_rows, target_rows
from tests.gpu.sanitize import DONE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
KINDS: tuple[Kind, ...] = ("gelu", "relu_squared")
PRODUCTS = [(64, 128, 128), (448, 384, 256), (256, 256, 1024)]  # M, N, K


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).cuda()


def number(value: float) -> torch.Tensor:
    return torch.tensor([value]).cuda()


def slot(dtype: torch.dtype) -> Slot:
    return Slot(number(16.0), number(1 / 16), number(0.0), dtype)


def targets(rows: int, vocab_size: int) -> torch.Tensor:
    made = torch.arange(rows) * 7 % vocab_size
    made[::3] = -1
    return made.cuda()


def casts() -> None:
    for shape in [(16, 16), (144, 272), (272, 160)]:
        cast.cast_transpose(values(*shape, dtype=torch.float32), slot(E4M3))
        for dtype in FORMATS:
            _, _, partial = cast.cast_transpose(values(*shape), slot(dtype), sums=True)
            cast.reduce_columns(partial, values(shape[1], dtype=torch.float32), add=dtype == E4M3)


def norms() -> None:
    for m, n in [(16, 16), (208, 144), (208, 768), (80, 2048), (48, 2064), (80, 4096)]:
        x, weight, bias = values(m, n), values(n, dtype=torch.float32), values(n, dtype=torch.float32)
        layer_norm.layer_norm_cast(x, weight, bias, 1e-5, slot(E5M2), both=False)
        for given_bias in (bias, None):
            factors = values(m, dtype=torch.float32)
            layer_norm.layer_norm_transposed(x, weight, given_bias, 1e-5, slot(E4M3), factors)
            _, _, statistics = layer_norm.layer_norm_cast(x, weight, given_bias, 1e-5, slot(E4M3))
            for residual, given in [(None, None), (None, slot(E4M3)), (values(m, n), slot(E5M2))]:
                layer_norm.layer_norm_backward(values(m, n), x, statistics, weight, residual, given)


def softmaxes() -> None:
    for rows, vocab_size, columns in [(16, 1, 16), (48, 257, 400), (144, 160, 160), (16, 8193, 8320)]:
        logits, wanted = values(rows, columns), targets(rows, vocab_size)
        _, exponents = softmax_statistics(logits, wanted, vocab_size)
        q, _ = softmax_gradient_cast(logits, wanted, exponents, vocab_size)
        weight, inputs = (values(count, 272).to(E4M3) for count in (columns, rows))
        gradient, of_loss = (q, number(0.1)), number(0.4)
        target_rows(logits, wanted, exponents, gradient, of_loss, (weight, number(0.2)), (inputs, number(0.3)))


def activations() -> None:
    for kind, shape, dtype in itertools.product(KINDS, [(16, 16), (144, 272)], FORMATS):
        activation.activation_cast(kind, values(*shape), slot(dtype))
        activation.activation_backward_cast(kind, values(*shape), values(*shape), slot(dtype), slot(E4M3))


def products() -> None:
    for m, n, k in PRODUCTS:
        scales = number(0.3), number(0.07)
        of_a, b = {dtype: values(m, k).to(dtype) for dtype in FORMATS}, values(n, k).to(E4M3)
        forward = Operands(of_a[E4M3], b, *scales)
        assert fits(of_a[E4M3], b), (m, n, k)
        for kind in KINDS:
            for bias in (None, values(n)):
                _, slopes = product_activation(kind, forward, bias, slot(E4M3))
            for dtype in FORMATS:
                operands = Operands(of_a[dtype], b, *scales)
                product_activation_backward(kind, operands, slopes, number(1 / 16), slot(dtype))


def heads() -> None:
    for m, n, k in PRODUCTS:
        operands = Operands(values(m, k).to(E4M3), values(n, k).to(E4M3), number(0.3), number(0.07))
        wanted, vocab_size = targets(m, n - 84), n - 84
        ids = probabilities.choose_frequent(wanted, operands.b, vocab_size)
        of_rows = probabilities.compute_references(operands, wanted, ids)
        made = probabilities.product_probabilities(operands, of_rows, wanted, vocab_size)
        known, _ = probabilities.probability_rows(made, of_rows, wanted, number(0.4), number(0.1), 8)
        inputs, weight = (operands.a, operands.a_scale_inv), (operands.b, operands.b_scale_inv)
        add_target_rows(values(m, k), known.factors, known.rest, wanted, weight, inputs)


def weight_gradients() -> None:
    weight_gradient._work.cache_clear()  # for as many multiprocessors as there are now
    for (m, n, d), transposed in itertools.product([(64, 128, 128), (832, 384, 256)], (False, True)):
        out = torch.zeros((d, n) if transposed else (n, d)).cuda()
        for of_a, of_b in PAIRS:
            a, bt = values(m, n).to(of_a), values(d, m).to(of_b)
            for add in (None, out):
                weight_gradient.weight_gradient(a, bt, out, number(0.3), number(0.07), transposed=transposed, add=add)


def entropies() -> None:
    for rows, vocab_size, columns in [(5, 257, 320), (3, 8193, 8256)]:
        for dtype in (torch.bfloat16, torch.float32):
            logits = values(rows, columns, dtype=dtype).requires_grad_()
            (cross_entropy.fused_cross_entropy(logits * 1, targets(rows, vocab_size), vocab_size) * 3).backward()


def embeddings() -> None:
    for (batch, tokens), vocabulary, columns in [((3, 70), 100, 272), ((1, 16), 2, 16), ((2, 150), 70000, 16)]:
        ids = torch.arange(batch * tokens).view(batch, tokens).square() % vocabulary
        ids[0] = vocabulary - 1  # a run over several chunks
        ids, dx = ids.cuda(), values(batch, tokens, columns)
        table, positions = (values(rows, columns, dtype=torch.float32) for rows in (vocabulary, tokens + 2))
        for learned in (positions, None):
            embedding.embed(ids, table, learned)
        embedding.embedding_gradient(dx, ids, table)
        for add in (False, True):
            embedding.positions_gradient(dx, positions, add)


def heads_of_queries() -> None:
    cases = itertools.product([(3, 3, 64), (4, 2, 128), (1, 1, 80), (2, 2, 16)], (True, False), (True, False))
    for (queries, keys, size), norm, rope in cases:
        turns = rotary.Turns.of(values(37, size // 2, dtype=torch.float64)) if rope else None
        norms = (values(size, dtype=torch.float32), values(size, dtype=torch.float32)) if norm else ()
        packed = values(3, 37, (queries + 2 * keys) * size)
        for with_values in (False, True):
            rotary.prepare_heads(packed, queries, keys, turns, norms, 1e-5, with_values)
        gradient = packed.clone()
        dq, dk, _ = gradient.unflatten(2, (-1, size)).split([queries, keys, keys], 2)
        rotary.prepare_heads_backward(dq, dk, packed, gradient, turns, norms, 1e-5)


def run(*calls) -> None:
    for call in calls:
        print(call.__name__, flush=True)
        call()
        torch.cuda.synchronize()


def main() -> None:
    if reason := nvrtc.why_missing():
        raise SystemExit(f"the kernels in CUDA C++ cannot run: {reason}")
    run(
        casts, norms, softmaxes, activations, entropies, embeddings, products, heads, heads_of_queries, weight_gradients
    )
    nvrtc.processors = lambda device: 2  # blocks with many tiles each
    run(norms, products, heads, weight_gradients)
    print(DONE, flush=True)


if __name__ == "__main__":
    main()
