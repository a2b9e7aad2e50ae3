"""Where each parameter lies in Hugging Face's weights: under which names, in which parts, and which way round.

GPT-2's matrices are stored as [in, out] there, since its `Conv1D` multiplies from the right. Llama and Qwen3 have
queries, keys and values apart, and the gate apart from what it gates. Heads and RoPE's pairs are in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.config.block_spec import BlockSpec, block_spec
from gpt2_fp8.config.hf_config import GPT2, Architecture
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import Parameter, packed_rows, parameters

# By our names without `weight` or `bias`: the names there, which end in `.weight` or `.bias`.
_GPT2 = {
    "tokens.": ["transformer.wte"], "positions.": ["transformer.wpe"], "head.layer_norm_": ["transformer.ln_f"],
    "head.": ["lm_head"], "qkv.layer_norm_": ["ln_1"], "qkv.": ["attn.c_attn"], "projection.": ["attn.c_proj"],
    "mlp.layer_norm_": ["ln_2"], "mlp.fc1_": ["mlp.c_fc"], "mlp.fc2_": ["mlp.c_proj"],
}  # fmt: skip
_LLAMA = {
    "tokens.": ["model.embed_tokens"], "head.layer_norm_": ["model.norm"], "head.": ["lm_head"],
    "qkv.layer_norm_": ["input_layernorm"], "qkv.": [f"self_attn.{part}_proj" for part in "qkv"],
    "attention.q_norm": ["self_attn.q_norm"], "attention.k_norm": ["self_attn.k_norm"],
    "projection.": ["self_attn.o_proj"], "mlp.layer_norm_": ["post_attention_layernorm"],
    "mlp.fc1_": ["mlp.gate_proj", "mlp.up_proj"], "mlp.fc2_": ["mlp.down_proj"],
}  # fmt: skip
# What some folders also hold: masks and frequencies, which follow from the configuration.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Place(NamedTuple):
    """Where a parameter lies.

    Attributes:
        name: ours.
        parts: names there and their shapes here; their rows follow each other in ours.
        transposed: whether the tensors there have rows and columns exchanged.
        padding: rows of zeros that ours has after these.
    """

    name: str
    parts: dict[str, tuple[int, ...]]
    transposed: bool
    padding: int

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors there, with their shapes there."""
        return {name: shape[::-1] if self.transposed else shape for name, shape in self.parts.items()}


def places(model: ModelConfig, architecture: Architecture, vocab_size: int) -> list[Place]:
    """List where each parameter of a model lies, in the order of its state dict."""
    spec = block_spec(model)
    padding = padded_vocabulary(vocab_size) - vocab_size
    return [_place(parameter, spec, architecture, padding) for parameter in parameters(model, vocab_size)]


def from_hf(place: Place, load: Callable[[str], Tensor]) -> Tensor:
    """Return our parameter, float32. `load` returns a tensor by its name there."""
    parts = [load(name).float() for name in place.parts]
    whole = torch.cat([part.T if place.transposed else part for part in parts])
    return torch.cat([whole, whole.new_zeros(place.padding, *whole.shape[1:])]) if place.padding else whole


def to_hf(weights: Mapping[str, Tensor], where: list[Place]) -> dict[str, Tensor]:
    """Return Hugging Face's tensors of our parameters, contiguous, without the padding of the vocabulary."""
    found = {}
    for place in where:
        rows = [shape[0] for shape in place.parts.values()]
        parts = weights[place.name][: sum(rows)].split(rows)
        for name, part in zip(place.parts, parts, strict=True):
            found[name] = (part.T if place.transposed else part).contiguous()
    return found


def under_their_names(names: set[str], where: list[Place], architecture: Architecture) -> dict[str, str]:
    """Return {name as transformers writes it: name as stored}, without what follows from the configuration.

    GPT-2's first folders lack the prefix. A tied head may be stored a second time.
    """
    known = {name for place in where for name in place.parts}
    found = {}
    for stored in names:
        name = stored
        if architecture is GPT2 and not stored.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{stored}"
        if name in known or not (name.endswith(_BUFFERS) or name == "lm_head.weight"):
            found[name] = stored
    return found


def _place(parameter: Parameter, spec: BlockSpec, architecture: Architecture, padding: int) -> Place:
    prefix, own = "", parameter.name
    if own.startswith("blocks."):
        _, block, own = own.split(".", 2)
        prefix = f"transformer.h.{block}." if architecture is GPT2 else f"model.layers.{block}."
    stem, kind = _stem(own)
    theirs = (_GPT2 if architecture is GPT2 else _LLAMA)[stem]
    rows = packed_rows(spec, parameter.name, parameter.shape[0]) if len(theirs) > 1 else parameter.shape[:1]
    parts = {f"{prefix}{name}.{kind}": (count, *parameter.shape[1:]) for name, count in zip(theirs, rows, strict=True)}
    transposed = architecture is GPT2 and bool(prefix) and len(parameter.shape) == 2
    return Place(parameter.name, parts, transposed, padding if stem in ("tokens.", "head.") else 0)


def _stem(name: str) -> tuple[str, str]:
    """Split `qkv.bias` into `qkv.` and `bias`. QK-norm's weights are called by their stems alone."""
    kind = next((kind for kind in ("weight", "bias") if name.endswith(kind)), None)
    return (name, "weight") if kind is None else (name.removesuffix(kind), kind)
