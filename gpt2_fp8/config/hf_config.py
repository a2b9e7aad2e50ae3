"""Hugging Face's `config.json` and the keys of `model`: each in the other's words, for three architectures.

The three are GPT2LMHeadModel, LlamaForCausalLM and Qwen3ForCausalLM. What a file asks for beyond these keys would be
lost in silence, so it is refused, and so is a run whose `model` is not that of the folder that `init_from` names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_fp8.config.block_spec import GPT2_OPTIONS, ROPE_BASE, BlockSpec, Option, RoPE, block_spec
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
Keys = dict[str, Any]  # of `model`, with numbers where `null` would mean what follows from others


class Architecture(NamedTuple):
    """One of Hugging Face's classes."""

    name: str
    model_type: str
    always: frozenset[Option]  # that its block has
    perhaps: frozenset[Option]  # that its block may have


_ANY_HEADS = frozenset({Option.GROUPED_HEADS, Option.OWN_HEAD_SIZE, Option.SCALED_ROPE, Option.UNTIED_HEAD})
_MODERN = frozenset({Option.RMS_NORM, Option.SWIGLU, Option.ROPE})
GPT2 = Architecture("GPT2LMHeadModel", "gpt2", GPT2_OPTIONS - {Option.DROPOUT}, frozenset({Option.UNTIED_HEAD}))
LLAMA = Architecture("LlamaForCausalLM", "llama", _MODERN, _ANY_HEADS | {Option.BIAS})
QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", _MODERN | {Option.QK_NORM}, _ANY_HEADS)
ARCHITECTURES = (GPT2, LLAMA, QWEN3)
SUPPORTED = ", ".join(architecture.name for architecture in ARCHITECTURES)
_NO_FOLDER = f"give a folder of {SUPPORTED} with {CONFIG} and {WEIGHTS}, or a checkpoint of this program"

# Of a file that leaves a key out, as transformers reads it. None: it follows from others.
_DEFAULTS: dict[str, Keys] = {
    "gpt2": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "llama": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None},
    "qwen3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128},
}
# What else decides the numbers, and the values that mean what is computed here.
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu",)},
    "qwen3": {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
}  # fmt: skip


_ROPES = {None, "default", "linear", "llama3"}
_BANDS = {
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
}


def misfits(spec: BlockSpec, architecture: Architecture) -> list[str]:
    """Name what a block has that an architecture lacks, and the other way round."""
    own = spec.options() - {Option.DROPOUT}  # which decides no logits
    sides = {"no": own - architecture.always - architecture.perhaps, "always": architecture.always - own}
    return [
        f"{word} {option.removeprefix('a ')}" for word, found in sides.items() for option in Option if option in found
    ]


def to_hf(model: ModelConfig, architecture: Architecture, vocab_size: int, separator: int | None) -> dict[str, Any]:
    """Return the `config.json` of a model whose block an architecture has. `separator`: the id that ends a document."""
    spec, rope = block_spec(model), None
    shared = {
        "architectures": [architecture.name], "model_type": architecture.model_type, "vocab_size": vocab_size,
        "tie_word_embeddings": spec.tied, "bos_token_id": separator, "eos_token_id": separator,
        "torch_dtype": "float32",
    }  # fmt: skip
    if architecture is GPT2:
        return shared | {
            "n_layer": model.n_layer, "n_head": spec.heads.n_head, "n_embd": spec.n_embd,
            "n_positions": model.n_positions, "n_inner": spec.mlp.width,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), spec.dropout),
            "activation_function": "gelu_new", "layer_norm_epsilon": spec.norm.epsilon,
        }  # fmt: skip
    assert isinstance(spec.positions, RoPE)
    if spec.positions.bands is not None:
        bands = dict(zip(_BANDS.values(), astuple(spec.positions.bands), strict=True))
        rope = {"rope_type": "llama3", "factor": spec.positions.scaling} | bands
    elif spec.positions.scaling != 1:
        rope = {"rope_type": "linear", "factor": spec.positions.scaling}
    return {
        **shared, "attention_bias": spec.bias, **({"mlp_bias": spec.bias} if architecture is LLAMA else {}),
        "num_hidden_layers": model.n_layer, "num_attention_heads": spec.heads.n_head,
        "num_key_value_heads": spec.heads.n_kv_head, "head_dim": spec.heads.size, "hidden_size": spec.n_embd,
        "intermediate_size": spec.mlp.width, "hidden_act": "silu", "max_position_embeddings": model.n_positions,
        "rms_norm_eps": spec.norm.epsilon, "rope_theta": spec.positions.base, "rope_scaling": rope,
    }  # fmt: skip


def find_unsupported(text: Keys, architecture: Architecture) -> Iterator[str]:
    """Yield what a `config.json` asks for that no key of `model` says."""
    for key, values in _FIXED[architecture.model_type].items():
        if (value := text.get(key, values[0])) not in values:
            yield f"{key}={value!a:.60}, not {values[0]!a}"
    if text.get("quantization_config"):
        yield "quantization_config: its weights are quantized"
    if set(text.get("layer_types") or []) - {"full_attention"}:
        yield "layer_types other than full_attention"
    if architecture is LLAMA and bool(text.get("attention_bias")) != bool(text.get("mlp_bias")):
        yield "attention_bias without mlp_bias, or the other way round"
    rope = _rope(text)
    if architecture is not GPT2 and (kind := rope["rope_type"]) not in _ROPES:
        yield f"rope_type={kind!a:.60}, not {', '.join(sorted(filter(None, _ROPES)))}"
    if (part := rope.get("partial_rotary_factor", 1)) != 1:
        yield f"partial_rotary_factor={part!a:.60}"


def from_hf(text: Keys, architecture: Architecture) -> Keys:
    """Return the keys of `model` that a `config.json` says. Raises KeyError, TypeError or ValueError."""
    text = _DEFAULTS[architecture.model_type] | text
    keys: Keys = {"vocab_size": int(text["vocab_size"]), "tied_head": bool(text["tie_word_embeddings"])}
    if architecture is GPT2:
        n_embd, n_head = int(text["n_embd"]), int(text["n_head"])
        return keys | {
            "n_layer": int(text["n_layer"]), "n_head": n_head, "n_kv_head": n_head, "n_embd": n_embd,
            "head_size": n_embd // n_head, "qk_norm": False, "n_positions": int(text["n_positions"]),
            "norm": "layer_norm", "norm_epsilon": float(text["layer_norm_epsilon"]), "mlp": "gelu",
            "mlp_width": int(text.get("n_inner") or 4 * n_embd), "positions": "learned", "bias": True,
            **dict.fromkeys(("rope_base", "rope_scaling", *_BANDS)),
        }  # fmt: skip
    n_embd, n_head = int(text["hidden_size"]), int(text["num_attention_heads"])
    return keys | _from_rope(_rope(text)) | {
        "n_layer": int(text["num_hidden_layers"]), "n_head": n_head,
        "n_kv_head": int(text.get("num_key_value_heads") or n_head), "n_embd": n_embd,
        "head_size": int(text["head_dim"] or n_embd // n_head), "qk_norm": architecture is QWEN3,
        "n_positions": int(text["max_position_embeddings"]), "norm": "rms_norm",
        "norm_epsilon": float(text["rms_norm_eps"]), "mlp": "swiglu", "mlp_width": int(text["intermediate_size"]),
        "positions": "rope", "bias": bool(text.get("attention_bias")),
    }  # fmt: skip


def _rope(text: Keys) -> Keys:
    """Return what a file says of RoPE. Since transformers 5 it stands in one place, before that in two."""
    rope = {"rope_theta": text.get("rope_theta", ROPE_BASE)}
    rope |= text.get("rope_parameters") or text.get("rope_scaling") or {}
    return {"rope_type": rope.get("type")} | rope


def _from_rope(rope: Keys) -> Keys:
    keys: Keys = {"rope_base": float(rope["rope_theta"]), "rope_scaling": None, **dict.fromkeys(_BANDS)}
    if rope["rope_type"] in ("linear", "llama3"):
        keys["rope_scaling"] = float(rope["factor"])
    if rope["rope_type"] == "llama3":
        keys |= {ours: float(rope[theirs]) for ours, theirs in _BANDS.items()}
        keys["rope_original_positions"] = int(rope[_BANDS["rope_original_positions"]])
    return keys


def is_folder(path: str | Path) -> bool:
    """Return whether `path` is a Hugging Face folder, and no checkpoint of ours."""
    path = Path(path).expanduser()
    return os.path.isfile(path / CONFIG) and not os.path.lexists(path / "manifest.json")


def read_folder(path: Path) -> tuple[Architecture, Keys]:
    """Return a folder's architecture and keys of `model`. Raises UserError with every problem if it is of no use."""
    try:
        text = json.loads((path / CONFIG).read_bytes())
        named, kind = text.get("architectures"), text.get("model_type")
        fitting = [one for one in ARCHITECTURES if named == [one.name] or (not named and kind == one.model_type)]
        if not fitting:
            cause = f"init_from={path}: its architectures are {named!a:.100} (model_type {kind!a:.60})"
            raise UserError.of(cause, f"give a folder of {SUPPORTED}")
        (architecture,) = fitting
        asked, keys = list(find_unsupported(text, architecture)), from_hf(text, architecture)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise UserError.of(f"init_from={path}: its {CONFIG} cannot be read: {error!r}", _NO_FOLDER) from None
    problems = [Problem(f"init_from={path}: its {CONFIG} asks for {one}, for which there is no key") for one in asked]
    if not any((path / file).is_file() for file in (WEIGHTS, INDEX)):
        cause = f"init_from={path}: it has no {WEIGHTS}; pickles (pytorch_model.bin) are never opened"
        problems.append(Problem(cause, "save it with save_pretrained of transformers, which writes safetensors"))
    if problems:
        raise UserError(problems)
    return architecture, keys


def check_model(model: ModelConfig, tokens: int | None, path: Path) -> Iterator[Problem]:
    """Find every difference between `model` and a folder's. `tokens`: the tokenizer's ids, or None if unknown."""
    try:
        _, theirs = read_folder(path)
    except UserError as error:
        yield from (problem._replace(keys=("init_from",)) for problem in error.problems)
        return
    rope = theirs["positions"] == "rope"
    follows = {
        "n_kv_head": theirs["n_head"], "head_size": theirs["n_embd"] // theirs["n_head"],
        "mlp_width": 4 * theirs["n_embd"], "rope_base": ROPE_BASE if rope else None,
        "vocab_size": tokens or theirs["vocab_size"],
    }  # fmt: skip
    for key, value in theirs.items():
        own = follows.get(key) if getattr(model, key) is None else getattr(model, key)
        if key == "n_positions" and rope:  # a run may use fewer than its model has
            same = own <= value
        elif key == "vocab_size":
            same = own == value and (tokens is None or tokens <= value)
        else:
            same = own == value or (key == "rope_scaling" and {own, value} <= {None, 1})
        if not same:
            cause = f"model.{key}={show(own)}, init_from={path}: its model has {show(value)}"
            yield Problem(cause, f"model.{key}={show(value)}", (f"model.{key}", "init_from"))
