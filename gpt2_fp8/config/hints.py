"""What to say to someone who typed a name that does not exist: its name here, or similar ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from gpt2_fp8.config.keys import key_paths

# Names that other programs have for keys of ours.
ALIASES = {
    "block_size": "model.n_positions", "seq_len": "model.n_positions", "max_seq_len": "model.n_positions",
    "context_length": "model.n_positions", "hidden_size": "model.n_embd", "d_model": "model.n_embd",
    "num_layers": "model.n_layer", "num_hidden_layers": "model.n_layer", "num_heads": "model.n_head",
    "num_attention_heads": "model.n_head", "num_key_value_heads": "model.n_kv_head",
    "intermediate_size": "model.mlp_width", "rope_theta": "model.rope_base", "dropout": "model.dropout",
    "tie_word_embeddings": "model.tied_head", "batch_size": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size", "total_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "global_batch_size", "accumulate_grad_batches": "global_batch_size",
    "learning_rate": "optim.lr", "max_lr": "optim.lr", "min_lr": "optim.min_lr_ratio", "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2", "wd": "optim.weight_decay", "lr_scheduler": "optim.schedule",
    "warmup_iters": "optim.warmup_steps", "gradient_clip_val": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm", "max_iters": "trainer.max_steps", "num_iterations": "trainer.max_steps",
    "num_epochs": "trainer.max_epochs or trainer.max_tokens", "num_train_epochs": "trainer.max_epochs",
    "eval_interval": "trainer.val_check_interval", "save_interval": "callbacks.checkpoint_every_n_steps",
    "log_interval": "trainer.log_every_n_steps", "resume": "ckpt_path", "resume_from_checkpoint": "ckpt_path",
    "torch_compile": "compile", "gradient_checkpointing": "activation_checkpointing",
    "num_gpus": "trainer.devices", "world_size": "trainer.devices", "dtype": "precision=bf16, fp32 or fp8_hybrid",
    "use_fp8": "precision=fp8_hybrid", "fp8_recipe": "recipe=delayed, current or block",
    "wandb_project": "logger.wandb.project, with logger=[default,wandb]", "muon_lr": "optimizer.matrix_lr",
    "max_new_tokens": "tokens", "num_return_sequences": "samples",
}  # fmt: skip


def near(name: str, names: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` of `names` that look like `name`, the most similar first.

    If one differs only in upper and lower case, it is returned alone.
    """
    lower = {other.lower(): other for other in names}
    if name.lower() in lower:
        return [lower[name.lower()]]
    return [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=n, cutoff=cutoff)]


def either(words: Sequence[str]) -> str:
    """Join words: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def key_named(name: str, schema: type) -> str | None:
    """Return the key of a schema that a name without its group most likely means; None if none is similar."""
    leaves = {path.rpartition(".")[2]: path for path in reversed(key_paths(schema))}
    named = leaves | {path: path for path in leaves.values()}
    return ALIASES.get(name) or next((named[found] for found in near(name, named, 1)), None)


def unknown_key(path: str, own: Sequence[str], everywhere: Iterable[str]) -> tuple[str, str]:
    """Return cause and remedy for a key that does not exist where it was put.

    Args:
        own: the names that do exist there.
        everywhere: all keys there are, as paths.
    """
    group, _, leaf = path.rpartition(".")
    paths = list(everywhere)
    cause = f"there is no key {path}"
    if (alias := ALIASES.get(leaf)) and path not in paths:
        return cause, f"here it is {alias}"
    matches = [other for other in paths if other.rpartition(".")[2] == leaf]
    matches = matches or [f"{group}.{name}" if group else name for name in near(leaf, own, cutoff=0.75)]
    if not matches:
        groups = [other.partition(".")[0] for other in paths]
        named = {other.rpartition(".")[2]: other for other in paths} | {name: name for name in (*paths, *groups)}
        matches = [named[name] for name in [*near(path, named, 1, 0.7), *near(leaf, named, 2, 0.7)]]
    if matches:
        return cause, f"did you mean {either(list(dict.fromkeys(matches))[:3])}?"
    return cause, f"{group} has the keys {', '.join(own)}" if group else ""


def unknown_choice(key: str, value: str, choices: Sequence[str]) -> tuple[str, str]:
    """Return cause and remedy for a choice that does not exist."""
    matches = near(value.removesuffix(".yaml"), choices, 1)
    matches = matches or [c for c in choices if value and (c.startswith(value) or value.startswith(c))]
    have = f"the choices are {', '.join(choices)}"
    meant = f"did you mean {key}={either(matches)}? ({have})" if matches else have
    return f"{key}={value}: there is no such choice", meant
