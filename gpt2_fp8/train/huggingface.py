"""To and from Hugging Face: a folder that transformers loads without our code, and the weights of one. No pickles."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpt2_fp8.checkpoint import durable, files, pointers
from gpt2_fp8.checkpoint.manifest import CheckpointError, read_manifest
from gpt2_fp8.config import data_schema, disk, hf_config, tokenizer_file
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.data_schema import HubData
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.hf_config import CONFIG, INDEX, WEIGHTS, Architecture
from gpt2_fp8.config.programs import Averaged
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import FP8PrecisionConfig, ModelConfig, RunConfig
from gpt2_fp8.config.shown import format_count
from gpt2_fp8.data import tokenizer_export
from gpt2_fp8.model import hf_names
from gpt2_fp8.model.hf_names import Place
from gpt2_fp8.train import trained
from gpt2_fp8.train.trained import Trained

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # each value of them is one of float32
_WHOLE = "give a whole folder, as save_pretrained of transformers writes it"
_SHOWN = 5  # tensors that differ; a list of all of them helps nobody
CARD = """\
---
{metadata}
---
# {name}

A language model trained {how} with gpt2_fp8. It continues text. It was not taught to follow instructions, and
nobody has looked at what it says: it repeats what its text has, wrong or harmful parts too.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
ids = tokenizer("The", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=True, top_k=50)[0]))
```

Weights are in float32, computed by `{architecture}`. Before each document in training stood the token that ends the one
before; no other token was added.
"""


def export(
    source: Path, folder: Path, with_tokenizer: bool = True, license_id: str | None = None, weights: Averaged = "auto"
) -> str:
    """Write the weights of `source` to `folder`, float32, with tokenizer and model card; returns in a line what.

    `source` is a checkpoint, or a run's folder: then its last checkpoint. `license_id`: for the card. `weights`: see
    `trained.read`.
    """
    found = trained.read(trained.find_checkpoint(source), "precision", trained.TEXT, weights=weights)
    config, ids = found.config, vocabulary(found.config)
    architecture = choose_architecture(config.model, found.path)
    theirs = hf_names.to_hf(found.weights, hf_names.places(config.model, architecture, ids))
    separator = tokenizer_file.separator(config.data.tokenizer)
    count = sum(tensor.numel() for tensor in theirs.values())
    others: dict[str, bytes] = {}
    if with_tokenizer:
        trained.tokenizer_of(found, config.data.tokenizer, "--no-tokenizer writes the weights alone")
        others |= tokenizer_export.files_of(config.data.tokenizer, config.model.n_positions)
    others["README.md"] = _model_card(found, count, architecture.name, license_id).encode()
    _write_folder(folder, theirs, hf_config.to_hf(config.model, architecture, ids, separator), others)
    crossing = "; trained with document_mask=true, while transformers attends across documents"
    said = f"{folder}: {architecture.name}, {count:,} parameters, the {found.of} weights of {found.path}"
    return said + (crossing if config.document_mask else "")


def choose_architecture(model: ModelConfig, path: Path) -> Architecture:
    """Return the architecture that computes a model, or raise UserError with what the nearest one lacks."""
    spec = block_spec(model)
    misfits = {architecture: hf_config.misfits(spec, architecture) for architecture in hf_config.ARCHITECTURES}
    best = min(misfits, key=lambda architecture: len(misfits[architecture]))
    if misfits[best]:
        cause = f"{path}: no class of Hugging Face's computes model={model.name}: {best.name}, the nearest, has "
        raise UserError.of(
            cause + ", ".join(misfits[best]), "train with the options of one of them (docs/huggingface.md)"
        )
    return best


def _model_card(found: Trained, parameters: int, architecture: str, license_id: str | None) -> str:
    """Return Hugging Face's README.md of a model: what its run knows of it. `parameters`: without padding."""
    config, manifest, data = found.config, read_manifest(found.path), found.config.data
    step = int(manifest["global_step"])
    begun = found.parts[trained.KEY].get("init_from")
    repos = sorted({source.repo for _, source in data_schema.sources_of(data) if isinstance(source, HubData)})
    rows = {
        "model": f"{config.model.name}: {config.model.n_layer} layers of {config.model.n_embd}, "
        f"{config.model.n_head} heads",
        "began from": begun or "",
        "parameters": f"{parameters:,}",
        "context": f"{config.model.n_positions:,} tokens",
        "tokenizer": data.tokenizer,
        "text": data.name + (f" ({', '.join(repos)})" if repos else ""),
        "trained on": f"{step * tokens_a_step(config):,} tokens: {step:,} steps of {config.global_batch_size:,} "
        "sequences",
        "weights": "" if found.of == "raw" else f"averaged over steps, with a decay of {config.optim.ema_decay}",
        **_computed_rows(found),
        "optimizer": f"{config.optimizer.name}, peak rate {config.optim.lr:g}, {config.optim.schedule}, "
        f"weight decay {config.optim.weight_decay:g}",
        "seed": str(config.seed),
        "written by": ", ".join(f"{name} {version}" for name, version in manifest.get("written_by", {}).items()),
    }
    metadata = [] if license_id is None else [f"license: {json.dumps(license_id)}"]
    metadata += ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- gpt2_fp8"]
    if repos:
        metadata += ["datasets:", *(f"- {json.dumps(repo)}" for repo in repos)]
    return CARD.format(
        metadata="\n".join(metadata),
        name=config.model.name,
        how="from scratch" if begun is None else "further",
        table="\n".join(f"| {key} | {value} |" for key, value in rows.items() if value),
        architecture=architecture,
    )


def _computed_rows(found: Trained) -> dict[str, str]:
    """Return the card's rows of what the run computed in, and of its validation loss."""
    said, in_bf16 = found.parts.get("precision", {}), found.step.get("last_in_bf16", 0)
    ran, asked = said.get("ran", ""), found.config.precision
    recipe = f", recipe {said['recipe']}" if said.get("recipe") else ""
    last = f", the last {format_count(in_bf16, 'step')} in bf16" if in_bf16 else ""
    rows = {"precision": f"{ran}{recipe}{last}" if ran else ""}
    noted = pointers.read_note(found.path)
    if found.of == "raw" and found.config.optim.ema_decay is not None:
        noted = None  # it is the average's
    if noted is not None and noted.val_loss is not None:
        evaluated = isinstance(asked, FP8PrecisionConfig) and asked.evaluation == "bf16" and ran.startswith("fp8")
        loss = f"{noted.val_loss:.4f} nats a token, perplexity {math.exp(min(noted.val_loss, 700)):,.2f}"
        rows["validation loss"] = loss + (f", computed in {'bf16' if evaluated else ran}" if ran else "")
    return rows


def import_weights(source: Path, folder: Path, config: RunConfig) -> str:
    """Write the weights of `source` as the checkpoint `folder`, float32, of step 0; returns in a line what.

    `config`: a run's, with the folder's model.
    """
    ids = vocabulary(config)
    weights = read_weights(source, config.model, ids)
    plain = trained.to_plain(config, ids)
    files.write(folder, {"state_dict": weights, trained.KEY: plain, "global_step": 0})
    count = sum(weight.numel() for weight in weights.values())
    return f"{folder}: a checkpoint of {config.model.name}, {count:,} parameters with padding, from {source}"


def read_weights(path: Path, model: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights of `path`, a checkpoint of ours or a Hugging Face folder, float32, by our names.

    Raises CheckpointError for weights that are damaged, or no weights of the model.
    """
    if not hf_config.is_folder(path):
        weights = files.read_weights(path)
        trained.check_weights(path, model)
        return weights
    architecture, _ = hf_config.read_folder(path)
    where, tensors = hf_names.places(model, architecture, vocab_size), _load_tensors(path)
    stored = hf_names.under_their_names(set(tensors), where, architecture)
    if differences := list(_differences(where, {name: tuple(tensors[key].shape) for name, key in stored.items()})):
        raise _weights_error(path, differences[:_SHOWN])
    odd = [f"{key} is of {tensors[key].dtype}" for key in stored.values() if tensors[key].dtype not in _DTYPES]
    if odd:
        raise _weights_error(path, odd[:_SHOWN])
    return {place.name: hf_names.from_hf(place, lambda name: tensors[stored[name]]) for place in where}


def _differences(where: list[Place], given: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what is missing, of another shape, or too much."""
    wanted = {name: shape for place in where for name, shape in place.stored_shapes().items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            there, needed = (str(of.get(name, "nothing")) for of in (given, wanted))
            yield f"{name} is {there} there, and the model has {needed}"


def _load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder, by the names in its files: they are mapped into memory, and read when used."""
    try:
        return {key: tensor for name in _files(path) for key, tensor in load_file(path / name).items()}
    except (SafetensorError, OSError) as error:
        raise _weights_error(path, [f"they cannot be read ({error})"]) from error


def _weights_error(path: Path, reasons: list[str]) -> CheckpointError:
    """Return the error that says why a folder's weights are of no use."""
    return CheckpointError([Problem(f"the weights of init_from={path}: {reason}", _WHOLE) for reason in reasons])


def _write_folder(path: Path, weights: dict[str, Tensor], config: dict[str, Any], others: Mapping[str, bytes]) -> None:
    """Write a folder that is not there yet, or is empty. It appears whole or not at all. Raises OSError.

    `others`: what other small files are to be in it, by their names.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        files.save_tensors(temporary / WEIGHTS, weights)
        durable.write_json(temporary / CONFIG, config)
        for name, content in others.items():
            (temporary / name).write_bytes(content)
            durable.fsync(temporary / name)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    durable.fsync(path.parent)


def _files(path: Path) -> list[str]:
    """Return the names of a folder's files of weights."""
    if (path / WEIGHTS).is_file():
        return [WEIGHTS]
    try:
        names = sorted(set(disk.read_json(path / INDEX)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _weights_error(path, [f"{INDEX} cannot be read ({error})"]) from None
    if odd := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise _weights_error(path, [f"{INDEX} names {odd[0]!a:.100}, which is no file of safetensors in the folder"])
    return names
