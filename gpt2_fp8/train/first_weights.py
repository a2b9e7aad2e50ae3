"""The weights that `init_from` names: those of a checkpoint of ours, or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from gpt2_fp8.checkpoint import hf_folder
from gpt2_fp8.checkpoint.load import read_weights
from gpt2_fp8.config import hf_config
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.model import hf_names
from gpt2_fp8.model.hf_names import Place

_SHOWN = 5  # tensors that differ; a list of all of them helps nobody


def read(path: Path, model: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights of `path`, float32, by our names.

    Raises CheckpointError for weights that are damaged, or no weights of the model.
    """
    if not hf_config.is_folder(path):
        return read_weights(path)
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
