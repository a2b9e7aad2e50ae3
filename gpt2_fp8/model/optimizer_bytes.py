"""The bytes of an optimizer's state, from the settings alone: for estimates of memory and of checkpoints.

Of a parameter: adamw has two moments in float32 (8 bytes), and adamw_bf16 two in bfloat16 (4). Muon has one momentum in
float32 for a block's matrix (4), and AdamW's for the rest.
"""

from __future__ import annotations

from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.schema import ModelConfig, OptimizerConfig, RegisteredOptimizer
from gpt2_fp8.model.parameters import Parameter, of_block, outside_blocks


def optimizer_bytes(optimizer: OptimizerConfig, model: ModelConfig, padded_vocab_size: int) -> int:
    """Return the bytes of the state of all parameters, without the counts of updates."""
    spec = block_spec(model)
    outside = outside_blocks(spec, model.n_positions, padded_vocab_size)
    of_outside, of_one_block = (
        sum(_of(optimizer, parameter, in_block) for parameter in some)
        for some, in_block in ((outside, False), (of_block(spec), True))
    )
    return of_outside + model.n_layer * of_one_block


def _of(optimizer: OptimizerConfig, parameter: Parameter, in_block: bool) -> int:
    count, name = parameter.numel, optimizer.name
    if isinstance(optimizer, RegisteredOptimizer):
        return optimizer.state_bytes * count
    if name == "muon" and in_block and len(parameter.shape) == 2:
        return 4 * count
    return {"adamw": 8, "adamw_bf16": 4, "muon": 8}[name] * count
