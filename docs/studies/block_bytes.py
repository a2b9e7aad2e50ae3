"""Bytes of GPT-2's block, a token and channel: what its kernels move in bf16 and in FP8, and what it keeps.

    python docs/studies/block_bytes.py

What is moved is counted from the shapes, for widths that `kernels.product_gelu` takes. In bf16 every kernel between
two GEMMs is one, as a compiler makes it. Weights and statistics of rows are left out: at 65,536 rows they are little.
What bf16 keeps is what autograd saves, on a CPU; what the fused layers keep are the fields of `layers.fused_parts`. No
GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import program
import torch
from torch import Tensor

from gpt2_fp8 import load_config
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.runtime.arguments import Parser

B, E = 2, 1  # bytes of a number in bf16 and in FP8
P, F = 3, 4  # widths, in units of n_embd: queries, keys and values; the MLP's hidden layer
GEMM, ATTENTION, REST = "GEMMs, with what is fused into them", "attention", "the other kernels"
MOVED = (  # a kernel, what it is, its bytes in bf16, and in the fused layers: what is read + what is written
    ("normalisation (bf16: after the residual addition)", REST, B + B + B + B, B + 2 * E),
    ("queries, keys, values", GEMM, B + P * B, E + P * B),
    ("attention", ATTENTION, P * B + B, P * B + B),
    ("cast of its result, both layouts", REST, 0, B + 2 * E),
    ("projection (FP8: with the residual added)", GEMM, B + B, E + B + B),
    ("normalisation, as above", REST, B + B + B + B, B + 2 * E),
    ("fc1 (FP8: with GELU, its cast and its derivative)", GEMM, B + F * B, E + 2 * F * E),
    ("GELU", REST, F * B + F * B, 0),
    ("fc2 (FP8: with the residual added)", GEMM, F * B + B, F * E + B + B),
    ("fc2, input gradient (FP8: with GELU's derivative)", GEMM, B + F * B, E + 2 * F * E),
    ("fc2, weight gradient", GEMM, B + F * B, E + F * E),
    ("GELU's derivative", REST, F * B + F * B + F * B, 0),
    ("fc1, weight gradient", GEMM, F * B + B, F * E + E),
    ("fc1, input gradient", GEMM, F * B + B, F * E + B),
    ("normalisation's gradient (FP8: with casts)", REST, B + B + B + B, B + B + B + B + 2 * E),
    ("projection, weight gradient", GEMM, B + B, E + E),
    ("projection, input gradient", GEMM, B + B, E + B),
    ("attention's gradient", ATTENTION, P * B + B + B + P * B, P * B + B + B + P * B),
    ("cast of it, both layouts", REST, 0, P * B + 2 * P * E),
    ("queries, keys, values: weight gradient", GEMM, P * B + B, P * E + E),
    ("queries, keys, values: input gradient", GEMM, P * B + B, P * E + B),
    ("normalisation's gradient, as above", REST, B + B + B + B, B + B + B + B + 2 * E),
)
FUSIONS = (
    2 * B + F * B + 2 * F * B
)  # less in bf16 if its GEMMs added residuals, and had GELU and its derivative in them
KEPT = {  # by the fused layers
    "x": B, "queries, keys, values": P * B, "attention's result": B, "the middle": B,
    "GELU's result and its derivative": 2 * F * E, "inputs of three GEMMs, transposed": 3 * E,
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Print every kernel's bytes, their sums, and what is kept; it takes no words. Returns the exit code."""
    try:
        Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    tell()
    return 0


def tell() -> None:
    """Print the table and the sums."""
    print("| bytes a token and channel | bf16 | FP8, fused |\n|---|---|---|")
    for name, _, bf16, fp8 in MOVED:
        print(f"| {name} | {bf16 or ''} | {fp8 or ''} |")
    for kind in (GEMM, ATTENTION, REST):
        print("| sum: {} | {} | {} |".format(kind, *sums(kind)))
    bf16, fp8 = sums(GEMM, ATTENTION, REST)
    print(f"| sum | {bf16} | {fp8} |\n\nmoved: {fp8 / bf16:.0%} of bf16, ", end="")
    print(f"{fp8 / (bf16 - FUSIONS):.0%} of the {bf16 - FUSIONS} with the same fusions")
    print(f"kept in FP8, fused: {sum(KEPT.values())} ({'; '.join(f'{name} {count}' for name, count in KEPT.items())})")
    print(f"kept in bf16: {kept_in_bf16(compiled=False):.1f}, compiled {kept_in_bf16(compiled=True):.1f}")


def sums(*kinds: str) -> tuple[int, int]:
    """Return what kernels of these kinds move, in bf16 and in FP8."""
    rows = [row for row in MOVED if row[1] in kinds]
    return sum(row[2] for row in rows), sum(row[3] for row in rows)


def kept_in_bf16(compiled: bool, width: int = 256, tokens: int = 64) -> float:
    """Count the bytes, a token and channel, that autograd saves of a block of plain layers under bf16 autocast.

    They are what twice the rows add, so that copies of weights drop out.
    """
    words = ["model.n_layer=1", f"model.n_embd={width}", f"model.n_head={width // 64}", f"model.n_positions={tokens}"]
    block = GPT2(load_config("model=gpt2", *words).model, 320, Composed(reference, recompute="none")).blocks[0]
    compute = torch.compile(block, dynamic=False) if compiled else block
    parameters = {parameter.data_ptr() for parameter in block.parameters()}
    counts = []
    for rows in (2, 4):
        x = torch.randn(rows, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16), nullcontext() if compiled else hooks:
            y = compute(x, None)
        for node in _nodes(y) if compiled else ():  # one of them holds all of it
            for tensor in getattr(node, "saved_tensors", None) or ():
                keep(tensor)
        counts.append(sum(saved.values()))
    return (counts[1] - counts[0]) / (2 * tokens * width)


def _nodes(y: Tensor) -> Iterator[torch.autograd.graph.Node]:
    todo = [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            yield node
            todo += [below for below, _ in node.next_functions]


if __name__ == "__main__":
    program.run(main)
