"""The parameters that follow from a block's description: names, shapes and roles.

Every family of layers has these names and shapes, so a state dict moves between them unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gpt2_fp8.config.block_spec import BlockSpec, Norm

Role = Literal["norm", "bias", "weight", "into_residual", "lookup"]


class Parameter(NamedTuple):
    """A tensor of the model.

    `into_residual`: the weight of a linear layer whose result is added to the residual stream. `lookup`: a table that
    takes part in no GEMM.
    """

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def of_block(spec: BlockSpec) -> list[Parameter]:
    """List the parameters of one block, by their names within it."""
    d, heads, mlp = spec.n_embd, spec.heads, spec.mlp
    return [
        *_norm("qkv.layer_norm", d, spec.norm),
        *_projection("qkv.", heads.packed, d, spec.bias),
        *(Parameter(f"attention.{name}_norm", (heads.size,), "norm") for name in ("q", "k") if heads.qk_norm),
        *_projection("projection.", d, heads.queries, spec.bias, "into_residual"),
        *_norm("mlp.layer_norm", d, spec.norm),
        *_projection("mlp.fc1_", mlp.projected, d, spec.bias),
        *_projection("mlp.fc2_", d, mlp.width, spec.bias, "into_residual"),
    ]


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter, by its name in the model, is a matrix of a block: what Muon is for."""
    return name.startswith("blocks.") and len(shape) == 2


def packed_rows(spec: BlockSpec, name: str, rows: int) -> tuple[int, ...]:
    """Return the rows of each matrix that a block's weight of `rows` holds: queries, keys and values, or SwiGLU's."""
    heads, mlp = spec.heads, spec.mlp
    if name.endswith("qkv.weight"):
        return heads.queries, heads.keys, heads.keys
    if name.endswith("mlp.fc1_weight"):
        return (mlp.width,) * (mlp.projected // mlp.width)
    return (rows,)


def outside_blocks(spec: BlockSpec, n_positions: int, padded_vocab_size: int) -> list[Parameter]:
    """List the parameters of embedding and head. A tied head is listed once."""
    d = spec.n_embd
    found = [Parameter("tokens.weight", (padded_vocab_size, d), "weight" if spec.tied else "lookup")]
    if spec.positions == "learned":
        found.append(Parameter("positions.weight", (n_positions, d), "lookup"))
    found += _norm("head.layer_norm", d, spec.norm)
    return found if spec.tied else [*found, Parameter("head.weight", (padded_vocab_size, d), "weight")]


def parameters(spec: BlockSpec, n_layer: int, n_positions: int, padded_vocab_size: int) -> Iterator[Parameter]:
    """List the parameters of a whole model, by the names of its state dict."""
    yield from outside_blocks(spec, n_positions, padded_vocab_size)
    for i in range(n_layer):
        for parameter in of_block(spec):
            yield parameter._replace(name=f"blocks.{i}.{parameter.name}")


def count(spec: BlockSpec, n_layer: int, n_positions: int, padded_vocab_size: int) -> int:
    """Count the elements of all parameters of a model with `n_layer` blocks."""
    outside = outside_blocks(spec, n_positions, padded_vocab_size)
    return sum(p.numel for p in outside) + n_layer * sum(p.numel for p in of_block(spec))


def _norm(prefix: str, width: int, norm: Norm) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}_weight", (width,), "norm")
    if norm.kind == "layer_norm":
        yield Parameter(f"{prefix}_bias", (width,), "bias")


def _projection(prefix: str, out: int, into: int, bias: bool, role: Role = "weight") -> Iterator[Parameter]:
    """List the parameters of a linear layer from `into` to `out` channels."""
    yield Parameter(f"{prefix}weight", (out, into), role)
    if bias:
        yield Parameter(f"{prefix}bias", (out,), "bias")
