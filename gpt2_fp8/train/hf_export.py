"""From a checkpoint to a Hugging Face folder, which transformers loads without any code of ours."""

from __future__ import annotations

from pathlib import Path

from gpt2_fp8.checkpoint import hf_folder
from gpt2_fp8.checkpoint.errors import unreadable
from gpt2_fp8.config import hf_config, tokenizer_file
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.hf_config import Architecture
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.model import hf_names
from gpt2_fp8.train import trained


def export(source: Path, folder: Path) -> str:
    """Write the weights of `source` to `folder`, float32; returns in a line what was written.

    `source` is a checkpoint, or a run's folder: then its last checkpoint. Raises UserError for a checkpoint that cannot
    be read or has no weights of its model, and for a model that no architecture computes. Raises OSError if the disk
    does not take it.
    """
    path, config, weights, _ = found = trained.read(trained.find_checkpoint(source))
    architecture = chosen(config.model, path)
    trained.check(found)
    ids = vocabulary(config)
    theirs = hf_names.to_hf(weights, hf_names.places(config.model, architecture, ids))
    separator = tokenizer_file.separator(config.data.tokenizer)
    hf_folder.write(folder, theirs, hf_config.to_hf(config.model, architecture, ids, separator))
    count = sum(tensor.numel() for tensor in theirs.values())
    crossing = "; trained with document_mask=true, while transformers attends across documents"
    return f"{folder}: {architecture.name}, {count:,} parameters, from {path}{crossing if config.document_mask else ''}"


def chosen(model: ModelConfig, path: Path) -> Architecture:
    """Return the architecture that computes a model. Raises UserError, with what the nearest lacks, if none does.

    `path`: the checkpoint, which may be a stranger's.
    """
    try:
        spec = block_spec(model)
    except ValueError as error:
        raise unreadable(path, f"its model does not fit together: {error}") from None
    misfits = {architecture: hf_config.misfits(spec, architecture) for architecture in hf_config.ARCHITECTURES}
    best = min(misfits, key=lambda architecture: len(misfits[architecture]))
    if misfits[best]:
        raise UserError.of(
            f"{path}: no class of Hugging Face's computes model={model.name}: {best.name}, the nearest, has "
            f"{', '.join(misfits[best])}",
            "train with the options of one of them (docs/huggingface.md); or read model.safetensors of the checkpoint",
        )
    return best
