"""From a checkpoint to a Hugging Face folder, which transformers loads without any code of ours."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import hf_folder, pointers
from gpt2_fp8.checkpoint.manifest import read_manifest
from gpt2_fp8.config import hf_config, mixture, tokenizer_file
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.data_schema import HubData
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.hf_config import Architecture
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import FP8PrecisionConfig, ModelConfig, RunConfig
from gpt2_fp8.config.shown import counted, line
from gpt2_fp8.data import tokenizer_export
from gpt2_fp8.data.tokenizer import fingerprint, load_tokenizer
from gpt2_fp8.model import hf_names
from gpt2_fp8.train import trained
from gpt2_fp8.train.trained import Trained

CARD_NAME = "README.md"
_PARTS = ("precision", "TokenDataModule")  # of a checkpoint, for the model card and the tokenizer
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


def export(source: Path, folder: Path, with_tokenizer: bool = True, license_id: str | None = None) -> str:
    """Write the weights of `source` to `folder`, float32, with tokenizer and model card; returns in a line what.

    `source` is a checkpoint, or a run's folder: then its last checkpoint. `license_id`: for the card. Raises UserError
    for a checkpoint that cannot be read or has no weights of its model. It does so too for a model that no architecture
    computes, and for a tokenizer that is not the run's any more. Raises OSError if the disk does not take it.
    """
    path, config, weights, _, parts = found = trained.read(trained.find_checkpoint(source), *_PARTS)
    architecture = choose_architecture(config.model, path)
    ids = vocabulary(config)
    theirs = hf_names.to_hf(weights, hf_names.places(config.model, architecture, ids))
    separator = tokenizer_file.separator(config.data.tokenizer)
    count = sum(tensor.numel() for tensor in theirs.values())
    others = _tokenizer(config, parts.get("TokenDataModule")) if with_tokenizer else {}
    others[CARD_NAME] = model_card(found, count, architecture.name, license_id).encode()
    hf_folder.write(folder, theirs, hf_config.to_hf(config.model, architecture, ids, separator), others)
    crossing = "; trained with document_mask=true, while transformers attends across documents"
    return f"{folder}: {architecture.name}, {count:,} parameters, from {path}{crossing if config.document_mask else ''}"


def choose_architecture(model: ModelConfig, path: Path) -> Architecture:
    """Return the architecture that computes a model. Raises UserError, with what the nearest lacks, if none does.

    `path`: the checkpoint, which may be a stranger's.
    """
    spec = block_spec(model)
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


def model_card(found: Trained, parameters: int, architecture: str, license_id: str | None) -> str:
    """Return Hugging Face's README.md of a model: what its run knows of it, with the metadata that the hub reads first.

    `parameters`: of the exported model, without padding. A checkpoint may be a stranger's, or lack what is shown.
    """
    config, manifest, data = found.config, read_manifest(found.path), found.config.data
    step, versions = int(manifest["global_step"]), manifest.get("written_by")
    begun = found.parts[trained.KEY].get("init_from")
    repos = sorted({source.repo for _, source in mixture.sources_of(data) if isinstance(source, HubData)})
    tokens = step * tokens_a_step(config)
    rows = {
        "model": f"{config.model.name}: {config.model.n_layer} layers of {config.model.n_embd}, "
        f"{config.model.n_head} heads",
        "began from": begun or "",
        "parameters": f"{parameters:,}",
        "context": f"{config.model.n_positions:,} tokens",
        "tokenizer": data.tokenizer,
        "text": data.name + (f" ({', '.join(repos)})" if repos else ""),
        "trained on": f"{tokens:,} tokens: {step:,} steps of {config.global_batch_size:,} sequences",
        "precision": _precision(found, step),
        "optimizer": f"{config.optimizer.name}, peak rate {config.optim.lr:g}, {config.optim.schedule}, "
        f"weight decay {config.optim.weight_decay:g}",
        "seed": str(config.seed),
        "validation loss": _validation(found),
        "written by": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else "",
    }
    metadata = [] if license_id is None else [f"license: {json.dumps(license_id)}"]
    metadata += ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- gpt2_fp8"]
    if repos:
        metadata += ["datasets:", *(f"- {json.dumps(repo)}" for repo in repos)]
    return CARD.format(
        metadata="\n".join(metadata),
        name=_text(config.model.name),
        how="from scratch" if begun is None else "further",
        table="\n".join(f"| {key} | {_text(value)} |" for key, value in rows.items() if value),
        architecture=architecture,
    )


def _precision(found: Trained, step: int) -> str:
    said, last = _said(found), found.step.get("last_in_bf16") or 0
    if not (ran := said.get("ran")):
        return ""
    recipe = f", recipe {said['recipe']}" if said.get("recipe") else ""
    in_bf16 = f", the last {counted(last, 'step')} in bf16" if isinstance(last, int) and 0 < last <= step else ""
    return f"{ran}{recipe}{in_bf16}"


def _validation(found: Trained) -> str:
    noted, ran, precision = pointers.noted(found.path), str(_said(found).get("ran") or ""), found.config.precision
    if noted is None or noted.val_loss is None:
        return ""
    in_bf16 = isinstance(precision, FP8PrecisionConfig) and precision.evaluation == "bf16" and ran.startswith("fp8")
    text = f"{noted.val_loss:.4f} nats a token, perplexity {math.exp(min(noted.val_loss, 700)):,.2f}"
    return text + (f", computed in {'bf16' if in_bf16 else ran}" if ran else "")


def _said(found: Trained) -> dict[str, Any]:
    """Return what a checkpoint says of its precision; nothing in one of an early version."""
    precision = found.parts.get("precision")
    return precision if isinstance(precision, dict) else {}


def _text(value: Any) -> str:
    """Return a value as text in a table: a checkpoint may be a stranger's."""
    return line(str(value), 200).replace("|", r"\|").replace("<", "&lt;")
