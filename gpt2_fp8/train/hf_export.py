"""From a checkpoint to a Hugging Face folder, which transformers loads without any code of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import hf_folder, pointers
from gpt2_fp8.checkpoint.manifest import read_manifest, unreadable
from gpt2_fp8.config import hf_config, tokenizer_file
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.hf_config import Architecture
from gpt2_fp8.config.schema import ModelConfig, RunConfig
from gpt2_fp8.data import tokenizer_export
from gpt2_fp8.data.tokenizer import fingerprint, load_tokenizer
from gpt2_fp8.model import hf_names
from gpt2_fp8.train import model_card, saved_config, trained
from gpt2_fp8.train.trained import Trained

_PARTS = ("precision", "TokenDataModule")  # of a checkpoint, for the model card and the tokenizer


def export(source: Path, folder: Path, with_tokenizer: bool = True, license_id: str | None = None) -> str:
    """Write the weights of `source` to `folder`, float32, with tokenizer and model card; returns in a line what.

    `source` is a checkpoint, or a run's folder: then its last checkpoint. `license_id`: for the card. Raises UserError
    for a checkpoint that cannot be read or has no weights of its model. It does so too for a model that no architecture
    computes, and for a tokenizer that is not the run's any more. Raises OSError if the disk does not take it.
    """
    path, config, weights, _, parts = found = trained.read(trained.find_checkpoint(source), *_PARTS)
    architecture = chosen(config.model, path)
    trained.check(found)
    ids = vocabulary(config)
    theirs = hf_names.to_hf(weights, hf_names.places(config.model, architecture, ids))
    separator = tokenizer_file.separator(config.data.tokenizer)
    count = sum(tensor.numel() for tensor in theirs.values())
    others = _tokenizer(config, parts.get("TokenDataModule")) if with_tokenizer else {}
    others[model_card.NAME] = _card(found, count, architecture.name, license_id).encode()
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


def _card(found: Trained, parameters: int, architecture: str, license_id: str | None) -> str:
    manifest, precision = read_manifest(found.path), found.parts.get("precision")
    validation = pointers.noted(found.path)
    versions = manifest.get("written_by")
    step = int(manifest["global_step"])
    about = model_card.About(
        step=step,
        parameters=parameters,
        val_loss=validation.val_loss if validation else None,
        precision=precision if isinstance(precision, dict) else {},
        versions=versions if isinstance(versions, dict) else {},
        begun=found.parts[saved_config.KEY].get("init_from"),
        license_id=license_id,
        last_in_bf16=_last_in_bf16(found.step, step),
    )
    return model_card.card(found.config, about, architecture)


def _last_in_bf16(state: Any, step: int) -> int:
    """Return how many steps before a checkpoint were in bf16 in a run in FP8; a stranger's that is no count is none."""
    last = state.get("last_in_bf16") if isinstance(state, dict) else None
    return last if type(last) is int and 0 < last <= step else 0
