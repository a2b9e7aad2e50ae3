"""The work of a training step, and the most a GPU can do: what `mfu_bf16` divides."""

from __future__ import annotations

from gpt2_fp8.config.schema import ModelConfig

# Dense bf16 peaks without sparsity, from NVIDIA's data sheets, by the name the driver reports.
PEAK_BF16_FLOPS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}


def parameter_count(config: ModelConfig, rows: int) -> int:
    """Parameters of the model with an embedding of `rows` rows, the tied head counted once."""
    d, biases = config.n_embd, 9 if config.bias else 0
    block = 12 * d * d + 4 * d + biases * d
    return rows * d + config.n_positions * d + config.n_layer * block + 2 * d


def flops_per_token(config: ModelConfig, rows: int) -> int:
    """Forward and backward: 6 N + 12 n_layer n_embd n_positions, N without the position table (Chowdhery et al. 2022,
    appendix B; attention is counted in full although half of it is masked)."""
    n = parameter_count(config, rows) - config.n_positions * config.n_embd
    return 6 * n + 12 * config.n_layer * config.n_embd * config.n_positions


def peak_bf16_flops(device_name: str) -> float | None:
    """The dense bf16 peak of a GPU in FLOP/s, or None where it is not known: a guess would make every ratio wrong."""
    return PEAK_BF16_FLOPS.get(device_name)
