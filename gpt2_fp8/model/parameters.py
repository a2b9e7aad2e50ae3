"""What follows from a block's description: the parameters' names, shapes and roles, FLOPs, and the optimizer's bytes.

Every family of layers has these names and shapes, so a state dict moves between them unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gpt2_fp8.config.block_spec import BlockSpec, Norm, block_spec
from gpt2_fp8.config.schema import ModelConfig, OptimizerConfig, RegisteredOptimizer

Role = Literal["norm", "bias", "weight", "into_residual", "lookup"]
# Dense bf16 peaks without sparsity, from NVIDIA's data sheets, by the name the driver reports.
PEAK_BF16_FLOPS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}


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


def parameter_count(config: ModelConfig, padded_vocab_size: int) -> int:
    """Count the parameters of a model whose embedding has `padded_vocab_size` rows. The tied head counts once."""
    return count(block_spec(config), config.n_layer, config.n_positions, padded_vocab_size)


def flops_per_token(config: ModelConfig, padded_vocab_size: int) -> int:
    """Count the FLOPs of a token, forward and backward: 6 N + 12 n_layer (n_head head_size) n_positions.

    N leaves out tables that are only looked up (Chowdhery et al. 2022, appendix B). Attention is counted in full,
    although half of it is masked.
    """
    spec = block_spec(config)
    lookups = sum(p.numel for p in outside_blocks(spec, config.n_positions, padded_vocab_size) if p.role == "lookup")
    n = parameter_count(config, padded_vocab_size) - lookups
    return 6 * n + 12 * config.n_layer * spec.heads.queries * config.n_positions


def peak_bf16_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s; None if it is not known, since a guess would make every ratio wrong."""
    return PEAK_BF16_FLOPS.get(device_name)


def optimizer_bytes(optimizer: OptimizerConfig, model: ModelConfig, padded_vocab_size: int) -> int:
    """Return the bytes of an optimizer's state of all parameters, without the counts of updates.

    Of a parameter: adamw has two moments in float32 (8 bytes), and adamw_bf16 two in bfloat16 (4). Muon has one
    momentum in float32 for a block's matrix (4), and AdamW's for the rest.
    """
    spec = block_spec(model)
    outside = outside_blocks(spec, model.n_positions, padded_vocab_size)
    of_outside, of_one_block = (
        sum(_state_bytes(optimizer, parameter, in_block) for parameter in some)
        for some, in_block in ((outside, False), (of_block(spec), True))
    )
    return of_outside + model.n_layer * of_one_block


def _state_bytes(optimizer: OptimizerConfig, parameter: Parameter, in_block: bool) -> int:
    count, name = parameter.numel, optimizer.name
    if isinstance(optimizer, RegisteredOptimizer):
        return optimizer.state_bytes * count
    if name == "muon" and in_block and len(parameter.shape) == 2:
        return 4 * count
    return {"adamw": 8, "adamw_bf16": 4, "muon": 8}[name] * count


def _norm(prefix: str, width: int, norm: Norm) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}_weight", (width,), "norm")
    if norm.kind == "layer_norm":
        yield Parameter(f"{prefix}_bias", (width,), "bias")


def _projection(prefix: str, out: int, into: int, bias: bool, role: Role = "weight") -> Iterator[Parameter]:
    """List the parameters of a linear layer from `into` to `out` channels."""
    yield Parameter(f"{prefix}weight", (out, into), role)
    if bias:
        yield Parameter(f"{prefix}bias", (out,), "bias")
