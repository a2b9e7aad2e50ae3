"""Words of other programs for the values and choices of ours, and for the keys of `generate` and `evaluate`."""

from __future__ import annotations

# Values that are none here, by their key.
_VALUES: dict[str, dict[str, str]] = {
    "optim.schedule": dict.fromkeys(("wsd", "trapezoidal", "trapezoid", "warmup_stable"), "warmup_stable_decay"),
    "activation_checkpointing": {
        **dict.fromkeys(("selective", "ffn", "op"), "mlp"),
        **dict.fromkeys(("true", "on", "yes", "block", "blocks", "layer", "whole", "all"), "full"),
        **dict.fromkeys(("false", "off", "no", "null"), "none"),
    },
    "precision.backend": {
        **dict.fromkeys(("transformer_engine", "transformer-engine", "transformerengine", "nvidia"), "te"),
        **dict.fromkeys(("ao", "torch_ao", "float8"), "torchao"),
        **dict.fromkeys(("torch", "pytorch", "plain", "eager"), "reference"),
        **dict.fromkeys(("emulate", "simulated"), "emulated"),
    },
    "attention": {
        **dict.fromkeys(("flash_attention", "flash_attn", "flash_attention_2", "fa2", "fa3", "fa4"), "flash"),
        **dict.fromkeys(("eager", "naive", "manual", "standard", "plain"), "math"),
        **dict.fromkeys(("fused", "cudnn_attention"), "cudnn"),
        **dict.fromkeys(("transformer_engine", "dot_product_attention"), "te"),
        **dict.fromkeys(("torch", "scaled_dot_product_attention"), "sdpa"),
    },
    "model.norm": {"rms": "rms_norm", "ln": "layer_norm", "layer": "layer_norm"},
    "model.mlp": {"silu": "swiglu", "glu": "swiglu", "gated": "swiglu", "gelu_new": "gelu", "gelu_tanh": "gelu"},
    "model.positions": {"rotary": "rope", "absolute": "learned", "table": "learned"},
}

# Choices that people bring from elsewhere, by their group, and ours.
CHOICES = {
    "precision": {
        **dict.fromkeys(("float32", "32", "32-true", "fp32-true", "full"), "fp32"),
        **dict.fromkeys(("float16", "fp16", "16", "16-mixed", "bfloat16", "bf16-mixed", "mixed", "amp"), "bf16"),
        **dict.fromkeys(("fp8", "float8", "hybrid", "fp8-hybrid", "e5m2"), "fp8_hybrid"),
        "e4m3": "fp8_e4m3",
    },
    "model": {
        **dict.fromkeys(("small", "124m", "117m", "125m", "gpt2_small", "gpt2-small", "gpt2-124m"), "gpt2"),
        **dict.fromkeys(("medium", "345m", "350m", "355m", "gpt2-medium"), "gpt2_medium"),
        **dict.fromkeys(("large", "762m", "774m", "gpt2-large"), "gpt2_large"),
        **dict.fromkeys(("xl", "1.5b", "1558m", "gpt2-xl"), "gpt2_xl"),
        **dict.fromkeys(("1b", "llama3.2", "llama-3.2-1b", "llama3.2-1b"), "llama3_2_1b"),
        **dict.fromkeys(("8b", "llama-3-8b", "llama3-8b"), "llama3_8b"),
    },
    "trainer": {"cuda": "gpu", "default": "auto", "ddp_spawn": "ddp"},
    "data": {
        "shakespeare": "tinyshakespeare", "tiny_shakespeare": "tinyshakespeare", "fineweb_edu": "fineweb",
        "fineweb-edu": "fineweb",
    },
}  # fmt: skip

# Choices of a group that are other words here, each with the reason: `penalty=l2`, `precision=mxfp8`.
_WEIGHT, _NAME = "it has a weight of its own", "it has another name here"
_RECIPE, _FORMAT, _SWEEP = "it is a recipe", "it is a precision", "it is a sweep of a checkout"
OF_A_GROUP: dict[str, dict[str, tuple[str, str]]] = {
    "penalty": {
        **dict.fromkeys(("logit_l2", "logits_l2", "l2", "logit"), (_WEIGHT, "penalty.logit_l2=1e-4")),
        **dict.fromkeys(
            ("activation_l1", "activations_l1", "l1", "activation"), (_WEIGHT, "penalty.activation_l1=1e-4")
        ),
    },
    "precision": {
        **{name: (_RECIPE, f"recipe={name}") for name in ("mxfp8", "delayed", "current", "block", "rowwise")},
        **{name: (_RECIPE, f"recipe={name}") for name in ("tensorwise", "blockwise")},
    },
    "recipe": {
        **dict.fromkeys(("hybrid", "fp8_hybrid"), (_FORMAT, "precision=fp8_hybrid")),
        **dict.fromkeys(("e4m3", "fp8_e4m3"), (_FORMAT, "precision=fp8_e4m3")),
        "bf16": (_FORMAT, "precision=bf16"),
    },
    "experiment": {  # of docs/seeds.md
        "fineweb_edu_bf16": (_NAME, "experiment=fineweb_edu_fp8 precision=bf16"),
        "test_fp8": (_NAME, "experiment=tinyshakespeare_fp8"),
        **dict.fromkeys(("openwebtext_adaptive", "openwebtext_adaptive_batch"), (_NAME, "experiment=openwebtext_bf16")),
        "test_auto_batch": ("it is a debug run with a key", "debug=fdr micro_batch_size=auto"),
        **dict.fromkeys(
            ("llama3_small_1f1l", "llama3_small_first_last"), (_NAME, "experiment=llama3_small_tensorwise_first_last")
        ),
        **{
            name: (_SWEEP, f"-cd docs/sweeps experiment={ours}")
            for names, ours in (
                (("sweep_lambda", "penalty_tinyshakespeare"), "penalty_tinyshakespeare"),
                (("sweep_lambda_openwebtext", "penalty_openwebtext"), "penalty_openwebtext"),
                (("sweep_lambda_fineweb", "penalty_fineweb_edu"), "penalty_fineweb_edu"),
            )
            for name in names
        },
    },
}

# Keys of `generate` and `evaluate`: what to type there.
_MODEL = "ckpt_path=outputs/RUN"
OF_GENERATE = {
    "max_new_tokens": "tokens=200",
    "max_tokens": "tokens=200",
    "max_length": "tokens=200",
    "n_tokens": "tokens=200",
    "num_tokens": "tokens=200",
    "num_samples": "samples=4",
    "num_return_sequences": "samples=4",
    "n": "samples=4",
    "do_sample": "temperature=1, or temperature=0 for the likeliest tokens",
    "greedy": "temperature=0",
    "temp": "temperature=0.8",
    "nucleus": "top_p=0.9",
    "start": "prompt=TEXT",
    "text": "prompt=TEXT",
    "input": "prompt=TEXT",
    "prompt_file": "prompts=FILE",
    "output": "out=FILE",
    "json": "out=FILE",
    "dtype": "precision=fp32 or bf16",
    "model": _MODEL,
    "run_name": _MODEL,
    "data.tokenizer": "tokenizer=PATH",
    "sliding_window": "slide=true",
    "ignore_eos": "stop=false",
}
OF_EVALUATE = {
    "output": "out=FILE",
    "json": "out=FILE",
    "hellaswag": "ranking=FILE",
    "tasks": "ranking=FILE",
    "run_name": _MODEL,
    "batch_size": "micro_batch_size=8",
    "tokenizer": "data.tokenizer=PATH",
}


def value(key: str, typed: object) -> str | None:
    """Return the value of `key` that another program's word stands for, or None."""
    return _VALUES.get(key, {}).get(str(typed).lower())


def choice(group: str, typed: str) -> str | None:
    """Return the choice of a group that another program's word stands for, or None."""
    return CHOICES.get(group, {}).get(typed.lower())


def words_of_choice(group: str, choice: str) -> tuple[str, str] | None:
    """Return why a choice is none of its group, and the words that do what it means; None if it is not known."""
    return OF_A_GROUP.get(group, {}).get(choice.lower())
