"""The model card of an exported folder: what the run knows of the model, as Hugging Face's README.md."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from gpt2_fp8.config import mixture
from gpt2_fp8.config.data_schema import HubData
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import FP8PrecisionConfig, RunConfig
from gpt2_fp8.config.shown import counted, line

NAME = "README.md"


class About(NamedTuple):
    """What a checkpoint says of its training.

    Attributes:
        step: optimizer steps.
        parameters: of the exported model, without padding.
        val_loss: nats a token at this step; None if it was not validated.
        precision: the checkpoint's `precision`: asked, ran, recipe. Empty in one of an early version.
        versions: of the libraries that wrote it, by their names.
        begun: the weights that it began from, as `init_from`; None: from scratch.
        license_id: the hub's identifier of the model's license; None: it has none yet.
        last_in_bf16: how many steps before it a run in FP8 computed in bf16.
    """

    step: int
    parameters: int
    val_loss: float | None
    precision: dict[str, Any]
    versions: dict[str, Any]
    begun: str | None = None
    license_id: str | None = None
    last_in_bf16: int = 0


def card(config: RunConfig, about: About, architecture: str) -> str:
    """Return the card as Markdown, with the metadata that the hub reads in front."""
    model, tokens = config.model, about.step * tokens_a_step(config)
    rows = {
        "model": f"{_text(model.name)}: {model.n_layer} layers of {model.n_embd}, {model.n_head} heads",
        "began from": "" if about.begun is None else _text(about.begun),
        "parameters": f"{about.parameters:,}",
        "context": f"{model.n_positions:,} tokens",
        "tokenizer": _text(config.data.tokenizer),
        "text": _source(config),
        "trained on": f"{tokens:,} tokens: {about.step:,} steps of {config.global_batch_size:,} sequences",
        "precision": _precision(about),
        "optimizer": f"{config.optimizer.name}, peak rate {config.optim.lr:g}, {config.optim.schedule}, "
        f"weight decay {config.optim.weight_decay:g}",
        "seed": str(config.seed),
        "validation loss": _loss(about.val_loss, _validated_in(config, about.precision)),
        "written by": ", ".join(f"{_text(name)} {_text(version)}" for name, version in about.versions.items()),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value)
    return f"""\
{_metadata(config, about.license_id)}
# {_text(model.name)}

A language model trained {_how(about)} with gpt2_fp8. It continues text. It was not taught to follow instructions, and
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


def _how(about: About) -> str:
    return "from scratch" if about.begun is None else "further"


def _metadata(config: RunConfig, license_id: str | None) -> str:
    lines = [] if license_id is None else [f"license: {json.dumps(license_id)}"]
    lines += ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- gpt2_fp8"]
    if repos := _repos(config):
        lines += ["datasets:", *(f"- {json.dumps(repo)}" for repo in repos)]
    return "\n".join(["---", *lines, "---"])


def _repos(config: RunConfig) -> list[str]:
    return sorted({source.repo for _, source in mixture.sources_of(config.data) if isinstance(source, HubData)})


def _source(config: RunConfig) -> str:
    repos = _repos(config)
    return _text(config.data.name) + (f" ({', '.join(map(_text, repos))})" if repos else "")


def _precision(about: About) -> str:
    ran, recipe = about.precision.get("ran"), about.precision.get("recipe")
    in_bf16 = f", the last {counted(about.last_in_bf16, 'step')} in bf16" if about.last_in_bf16 else ""
    return _text(ran) + (f", recipe {_text(recipe)}" if recipe else "") + in_bf16 if ran else ""


def _validated_in(config: RunConfig, said: dict[str, Any]) -> str:
    """Return what the validation computed in; "" if the checkpoint does not say in what it was trained."""
    ran, precision = str(said.get("ran") or ""), config.precision
    if isinstance(precision, FP8PrecisionConfig) and precision.evaluation == "bf16":
        return "bf16" if ran.startswith("fp8") else _text(ran)
    return _text(ran)


def _loss(loss: float | None, computed_in: str) -> str:
    if loss is None:
        return ""
    text = f"{loss:.4f} nats a token, perplexity {math.exp(min(loss, 700)):,.2f}"
    return text + (f", computed in {computed_in}" if computed_in else "")


def _text(value: Any) -> str:
    """Return a value as text in a table: a checkpoint may be a stranger's."""
    return line(str(value), 200).replace("|", r"\|").replace("<", "&lt;")
