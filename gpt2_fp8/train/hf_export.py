"""From a checkpoint to a Hugging Face folder, which transformers loads without any code of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import files, find, finite, hf_folder, pointers
from gpt2_fp8.checkpoint.errors import unreadable
from gpt2_fp8.checkpoint.manifest import read_manifest
from gpt2_fp8.config import hf_config, tokenizer_file
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.hf_config import Architecture
from gpt2_fp8.config.schema import ModelConfig, RunConfig
from gpt2_fp8.data import tokenizer_export
from gpt2_fp8.data.tokenizer import fingerprint, load_tokenizer
from gpt2_fp8.model import hf_names
from gpt2_fp8.train import model_card, saved_config


def export(source: Path, folder: Path, with_tokenizer: bool = True) -> str:
    """Write the weights of `source` to `folder`, float32, with tokenizer and model card; returns in a line what.

    `source` is a checkpoint, or a run's folder: then its last checkpoint. Raises UserError for a checkpoint that cannot
    be read or has no weights of its model, for a model that no architecture computes, and for a tokenizer that is not
    the run's any more. Raises OSError if the disk does not take it.
    """
    path = _checkpoint(source)
    checkpoint = files.read(path, "cpu", ("state_dict", saved_config.KEY, "precision", "TokenDataModule"))
    if saved_config.KEY not in checkpoint:
        remedy = "continue it for a step with ckpt_path, which saves one that does"
        raise UserError.of(f"{path} does not hold the configuration that it was trained with", remedy)
    config = saved_config.from_checkpoint(checkpoint, path)
    architecture = chosen(config.model, path)
    weights = checkpoint["state_dict"]
    saved_config.check_size(config, weights, path)
    finite.refuse(path, {name: finite.is_finite(weight) for name, weight in weights.items()})
    ids = vocabulary(config)
    theirs = hf_names.to_hf(weights, hf_names.places(config.model, architecture, ids))
    separator = tokenizer_file.separator(config.data.tokenizer)
    count = sum(tensor.numel() for tensor in theirs.values())
    others = _tokenizer(config, checkpoint.get("TokenDataModule")) if with_tokenizer else {}
    others[model_card.NAME] = _card(path, config, count, checkpoint, architecture.name).encode()
    hf_folder.write(folder, theirs, hf_config.to_hf(config.model, architecture, ids, separator), others)
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


def _tokenizer(config: RunConfig, data: Any) -> dict[str, bytes]:
    """Return the files of a run's tokenizer. Raises UserError if it is gone, or is not what the run was trained with.

    `data`: the state of the text in the checkpoint, which may be a stranger's, or missing.
    """
    name = config.data.tokenizer
    remedy = "set it back as it was; or --no-tokenizer writes the weights alone"
    try:
        found = tokenizer_export.files_of(name, config.model.n_positions)
        now = fingerprint(load_tokenizer(name))
    except UserError as error:
        raise UserError([Problem(problem.cause, remedy) for problem in error.problems]) from None
    said = data.get("fingerprint") if isinstance(data, dict) else None
    if isinstance(said, dict) and said.get("tokenizer", now) != now:
        raise UserError.of(f"data.tokenizer={name} is not what it was when the run was trained", remedy)
    return found


def _card(path: Path, config: RunConfig, parameters: int, checkpoint: dict[str, Any], architecture: str) -> str:
    manifest, precision = read_manifest(path), checkpoint.get("precision")
    try:
        validation = pointers.noted(path)
    except (OSError, ValueError):  # it holds something else: then it is not shown
        validation = None
    versions = manifest.get("written_by")
    trained = model_card.Trained(
        step=int(manifest["global_step"]),
        parameters=parameters,
        val_loss=validation.val_loss if validation else None,
        precision=precision if isinstance(precision, dict) else {},
        versions=versions if isinstance(versions, dict) else {},
        begun=checkpoint[saved_config.KEY].get("init_from"),
    )
    return model_card.card(config, trained, architecture)


def _checkpoint(source: Path) -> Path:
    """Return the checkpoint that `source` means. Raises UserError if there is none."""
    checkpoints = source / "checkpoints"
    if not checkpoints.is_dir():
        return source
    found = find.resolve("last", checkpoints)
    if found is None:
        raise UserError.of(f"{source} has no checkpoint yet", "name a run that has saved one")
    return found
