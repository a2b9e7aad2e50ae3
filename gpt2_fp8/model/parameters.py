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


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter, by its name in the model, is a matrix of a block: what Muon is for."""
    return name.startswith("blocks.") and len(shape) == 2


def packed_rows(spec: BlockSpec, name: str, rows: int) -> tuple[int, ...]:
    """Return the rows of each part that a parameter of `rows` holds: queries, keys and values, or SwiGLU's two."""
    heads, mlp = spec.heads, spec.mlp
    if name.endswith(("qkv.weight", "qkv.bias")):
        return heads.queries, heads.keys, heads.keys
    if name.endswith(("mlp.fc1_weight", "mlp.fc1_bias")):
        return (mlp.width,) * (mlp.projected // mlp.width)
    return (rows,)


def parameters(config: ModelConfig, padded_vocab_size: int) -> Iterator[Parameter]:
    """List the parameters of a whole model, by the names of its state dict. A tied head is listed once.

    `padded_vocab_size`: rows of the embedding.
    """
    spec = block_spec(config)
    d, heads, mlp = spec.n_embd, spec.heads, spec.mlp
    yield Parameter("tokens.weight", (padded_vocab_size, d), "weight" if spec.tied else "lookup")
    if spec.positions == "learned":
        yield Parameter("positions.weight", (config.n_positions, d), "lookup")
    yield from _norm("head.layer_norm", d, spec.norm)
    if not spec.tied:
        yield Parameter("head.weight", (padded_vocab_size, d), "weight")
    for block in (f"blocks.{i}." for i in range(config.n_layer)):
        yield from _norm(f"{block}qkv.layer_norm", d, spec.norm)
        yield from _projection(f"{block}qkv.", heads.packed, d, spec.bias)
        if heads.qk_norm:
            yield Parameter(f"{block}attention.q_norm", (heads.size,), "norm")
            yield Parameter(f"{block}attention.k_norm", (heads.size,), "norm")
        yield from _projection(f"{block}projection.", d, heads.queries, spec.bias, "into_residual")
        yield from _norm(f"{block}mlp.layer_norm", d, spec.norm)
        yield from _projection(f"{block}mlp.fc1_", mlp.projected, d, spec.bias)
        yield from _projection(f"{block}mlp.fc2_", d, mlp.width, spec.bias, "into_residual")


def parameter_count(config: ModelConfig, padded_vocab_size: int) -> int:
    """Count the elements of all parameters."""
    return sum(p.numel for p in parameters(config, padded_vocab_size))


def flops_per_token(config: ModelConfig, padded_vocab_size: int) -> int:
    """Count the FLOPs of a token, forward and backward: 6 N + 12 n_layer (n_head head_size) n_positions.

    N leaves out tables that are only looked up (Chowdhery et al. 2022, appendix B). Attention is counted in full,
    although half of it is masked.
    """
    n = sum(p.numel for p in parameters(config, padded_vocab_size) if p.role != "lookup")
    return 6 * n + 12 * config.n_layer * block_spec(config).heads.queries * config.n_positions


def peak_bf16_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s; None if it is not known, since a guess would make every ratio wrong."""
    return PEAK_BF16_FLOPS.get(device_name)


def optimizer_bytes(optimizer: OptimizerConfig, model: ModelConfig, padded_vocab_size: int) -> int:
    """Return the bytes of an optimizer's state of all parameters, without the counts of updates.

    Of a parameter: adamw has two moments in float32 (8 bytes), and adamw_bf16 two in bfloat16 (4). Muon has one
    momentum in float32 for a block's matrix (4), and AdamW's for the rest.
    """
    total = 0
    for parameter in parameters(model, padded_vocab_size):
        if isinstance(optimizer, RegisteredOptimizer):
            each = optimizer.state_bytes
        elif optimizer.name == "muon" and is_block_matrix(parameter.name, parameter.shape):
            each = 4
        else:
            each = {"adamw": 8, "adamw_bf16": 4, "muon": 8}[optimizer.name]
        total += each * parameter.numel
    return total


def _norm(prefix: str, width: int, norm: Norm) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}_weight", (width,), "norm")
    if norm.kind == "layer_norm":
        yield Parameter(f"{prefix}_bias", (width,), "bias")


def _projection(prefix: str, out: int, into: int, bias: bool, role: Role = "weight") -> Iterator[Parameter]:
    """List the parameters of a linear layer from `into` to `out` channels."""
    yield Parameter(f"{prefix}weight", (out, into), role)
    if bias:
        yield Parameter(f"{prefix}bias", (out,), "bias")
