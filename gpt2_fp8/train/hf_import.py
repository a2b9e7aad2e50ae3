"""The weights that `init_from` names, and a checkpoint of ours made of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from gpt2_fp8.checkpoint import files, hf_folder, load
from gpt2_fp8.config import hf_config
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.schema import ModelConfig, RunConfig
from gpt2_fp8.model import hf_names
from gpt2_fp8.model.hf_names import Place
from gpt2_fp8.train import trained


def write(source: Path, folder: Path, config: RunConfig) -> str:
    """Write the weights of `source` as the checkpoint `folder`, float32, of step 0; returns in a line what.

    `config`: a run's, with the folder's model. Raises CheckpointError for weights that are damaged, not finite, or none
    of the model, and OSError if the disk does not take them.
    """
    ids = vocabulary(config)
    weights = read_weights(source, config.model, ids)
    plain = trained.to_plain(config, ids)
    files.write(folder, {"state_dict": weights, trained.KEY: plain, "global_step": 0})
    count = sum(weight.numel() for weight in weights.values())
    return f"{folder}: a checkpoint of {config.model.name}, {count:,} parameters with padding, from {source}"


_SHOWN = 5  # tensors that differ; a list of all of them helps nobody


def read_weights(path: Path, model: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights of `path`, a checkpoint of ours or a Hugging Face folder, float32, by our names.

    Raises CheckpointError for weights that are damaged, or no weights of the model.
    """
    if not hf_config.is_folder(path):
        return load.read_weights(path)
    architecture, _ = hf_config.read_folder(path)
    where = hf_names.places(model, architecture, vocab_size)
    with hf_folder.opened(path) as tensors:
        stored = hf_names.under_their_names(set(tensors.shapes), where, architecture)
        if differences := list(_differences(where, {name: tensors.shapes[key] for name, key in stored.items()})):
            raise hf_folder.unfit(path, differences[:_SHOWN])
        return {place.name: hf_names.from_hf(place, lambda name: tensors.load(stored[name])) for place in where}


def _differences(where: list[Place], given: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what is missing, of another shape, or too much."""
    wanted = {name: shape for place in where for name, shape in place.stored().items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            there, needed = (str(of.get(name, "nothing")) for of in (given, wanted))
            yield f"{name} is {there} there, and the model has {needed}"
