"""The FLOPs of training, and the peak FLOP/s of a GPU: `mfu_bf16` is the quotient of the two."""

from __future__ import annotations

from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.model.parameters import count, outside_blocks

# Dense bf16 peaks without sparsity, from NVIDIA's data sheets, by the name the driver reports.
PEAK_BF16_FLOPS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}


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
