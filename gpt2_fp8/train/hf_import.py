"""From a Hugging Face folder to a checkpoint, with which any program of this package goes on."""

from __future__ import annotations

from pathlib import Path

from gpt2_fp8.checkpoint import files
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.train import first_weights, saved_config


def write(source: Path, folder: Path, config: RunConfig) -> str:
    """Write the weights of `source` as the checkpoint `folder`, float32, of step 0; returns in a line what.

    `config`: a run's, with the folder's model. Raises CheckpointError for weights that are damaged, not finite, or none
    of the model, and OSError if the disk does not take them.
    """
    ids = vocabulary(config)
    weights = first_weights.read(source, config.model, ids)
    plain = saved_config.to_plain(config, ids)
    files.write(folder, {"state_dict": weights, saved_config.KEY: plain, "global_step": 0})
    count = sum(weight.numel() for weight in weights.values())
    return f"{folder}: a checkpoint of {config.model.name}, {count:,} parameters with padding, from {source}"
