"""The values that keys of other programs are given, in the words of ours: a number or a name that was typed is kept."""

from __future__ import annotations

import math
import re
from contextlib import suppress

_RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "tensorwise", "blockwise")
_ABOVE_0 = math.ulp(0.0)
_ALWAYS = "leave it out, it is so"

# What true and what false come to; None: the general advice.
_FLAGS: dict[str, tuple[str | None, str]] = {
    **dict.fromkeys(("qk_layernorm", "use_qk_norm"), ("model.qk_norm=true", "model.qk_norm=false")),
    **dict.fromkeys(
        ("tie_word_embeddings", "tied", "tie_weights", "tie_embeddings", "weight_tying", "share_embeddings"),
        ("model.tied_head=true", "model.tied_head=false"),
    ),
    **dict.fromkeys(
        ("untied", "untie_embeddings_and_output_weights"), ("model.tied_head=false", "model.tied_head=true")
    ),
    "add_bias_linear": ("model.bias=true", "model.bias=false"),
    "disable_bias_linear": ("model.bias=false", "model.bias=true"),
    **dict.fromkeys(("use_te", "use_transformer_engine", "use_torchao", "float8"), (None, "leave it out")),
    **dict.fromkeys(("recompute", "recompute_activations"), (None, "activation_checkpointing=none")),
    **dict.fromkeys(("use_rmsnorm", "rms_norm", "rmsnorm", "use_rms_norm"), (None, "model.norm=layer_norm")),
    **dict.fromkeys(("swiglu", "use_swiglu"), (None, "model.mlp=gelu")),
    **dict.fromkeys(
        ("rope", "use_rope", "rotary", "use_rotary_position_embeddings"), (None, "model.positions=learned")
    ),
    **dict.fromkeys(
        ("gqa", "use_gqa", "group_query_attention"), (None, "leave it out: every head has its own keys and values")
    ),
    "use_fast_accum": ("precision.fast_accumulation=true", "precision.fast_accumulation=false"),
    "split_accumulator": ("precision.fast_accumulation=false", "precision.fast_accumulation=true"),
    "first_last_layers_bf16": (None, "leave it out"),
    "use_compile": ("compile=true", "compile=false"),
    "gradient_checkpointing": (None, "activation_checkpointing=none"),
    "use_pytorch_sdpa": ("attention=sdpa", "attention=auto"),
    **dict.fromkeys(("reset_attention_mask", "intra_document_mask", "document_masking"), (None, "document_mask=false")),
    **dict.fromkeys(("use_wandb", "wandb", "wandb_log", "mlflow"), (None, "logger=default")),
    "no_wandb": (None, "logger=[default,wandb]"),
    "use_tensorboard": (None, "logger=csv"),
    "auto_batch_size": (None, "micro_batch_size=8 (or another number of sequences)"),
    **dict.fromkeys(("fp8_monitoring", "log_fp8_scales", "log_amax"), (None, "callbacks.fp8_health=false")),
    "log_histograms": (None, "logger.histograms_every_n_steps=0"),
    "enable_checkpointing": (_ALWAYS, "callbacks.checkpoint_every_n_steps=0 (only at the end)"),
}
# Numbers: what is typed, from which on, and below which.
_COUNT, _WEIGHT, _PART = (1, math.inf), (0, math.inf), (0, 1)
_NUMBERS: dict[str, tuple[str, tuple[float, float]]] = {
    **dict.fromkeys(
        ("gqa", "use_gqa", "group_query_attention", "num_kv_heads", "n_kv_heads"), ("model.n_kv_head={}", _COUNT)
    ),
    "fp8_margin": ("recipe=delayed recipe.margin={}", (0, 101)),
    "fp8_amax_history_len": ("recipe=delayed recipe.amax_history_len={}", (1, 10**6 + 1)),
    "num_layers_at_start_in_bf16": ("precision.keep_bf16='[first:{}]'", _COUNT),
    "num_layers_at_end_in_bf16": ("precision.keep_bf16='[last:{}]'", _COUNT),
    **dict.fromkeys(("log_histograms", "histogram_freq"), ("logger.histograms_every_n_steps={}", _WEIGHT)),
    "muon_lr": ("optimizer=muon optimizer.matrix_lr={}", (_ABOVE_0, math.inf)),
    "muon_momentum": ("optimizer=muon optimizer.momentum={}", _PART),
    **dict.fromkeys(("z_loss_weight", "z_loss_multiplier", "zloss"), ("penalty.z_loss={}", _WEIGHT)),
    **dict.fromkeys(("l1_lambda", "l1_weight"), ("penalty.activation_l1={}", _WEIGHT)),
    **dict.fromkeys(
        ("penalty_weight", "penalty_lambda"),
        ("penalty.z_loss={0}, penalty.logit_l2={0} or penalty.activation_l1={0}", _WEIGHT),
    ),
}
_WHOLE = {
    name
    for name, (text, range_) in _NUMBERS.items()
    if range_ == _COUNT or "every_n_steps" in text or "recipe." in text
}
_NAMES = {
    "wandb_project": "logger=[default,wandb] logger.wandb.project={}",
    "wandb_entity": "logger=[default,wandb] logger.wandb.entity={}",
    "wandb_run_name": "run_name={}",
    "wandb_name": "run_name={}",
    "experiment_name": "logger=[default,mlflow] logger.mlflow.experiment={}",
}


def kept(name: str, typed: object) -> str | None:
    """Return what to type for a key `name` of another program that was given the value `typed`.

    None: no value is known to fit, so that the advice is the general one.
    """
    value = _scalar(typed) if isinstance(typed, str) else typed
    if isinstance(value, bool):
        return _FLAGS[name][0 if value else 1] if name in _FLAGS else None
    if isinstance(value, (int, float)):
        return _number(name, value)
    if name == "fp8_recipe" and value in _RECIPES:
        return f"recipe={value}"
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.-]*", value, re.ASCII)
    return _NAMES[name].format(value) if name in _NAMES and plain else None


def _number(name: str, value: float) -> str | None:
    if name not in _NUMBERS or (name in _WHOLE and not isinstance(value, int)):
        return None
    text, (low, high) = _NUMBERS[name]
    if value == 0 and "keep_bf16" in text:
        return "leave it out"
    return text.format(value) if low <= value < high else None


def _scalar(text: str) -> object:
    """Return the number or truth value that a word of a flag stands for, or the word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text
