"""What to say to someone who typed a name that does not exist: similar names, and the names of other programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from gpt2_fp8.config import other_words

# Names that people bring from elsewhere, or that the libraries once had: why they are no key, and what to do.
# Looked up by the whole path first, then by its last part.
_INTERVAL = ("Transformer Engine dropped it, and scales are updated every step now", "remove the key")
_GROUP = "precision is a group"
_KEPT = "layers are named"
_OPTIMIZER = ("optimizer is a group", "optimizer=adamw, adamw_bf16, adamw8bit or muon")
_SCHEDULE, _SCHEDULES = "it has a shorter name", "optim.schedule=cosine, linear, constant or warmup_stable_decay"
_ATTENTION = ("it has a shorter name", "attention=auto, sdpa, math, cudnn, flash or te")
_ATTENTION_OF_TE = (
    "it is Transformer Engine's, and stands in the environment",
    "attention=flash, cudnn, sdpa or te; or NAME=1 in front of the command, for attention=te",
)
_Z_LOSS = ("it is a penalty", "penalty.z_loss=1e-4")
_L1 = ("it is a penalty", "penalty.activation_l1=1e-4")
_WANDB = ("W&B is a choice of logger", "logger=[default,wandb]")
_MLFLOW = ("MLflow is a choice of logger", "logger=[default,mlflow]")
# Groups of keys that only a choice brings: what to choose.
UNCHOSEN = {"logger.wandb": "logger=[default,wandb]", "logger.mlflow": "logger=[default,mlflow]"}
_DOCUMENTS = ("it has another name", "document_mask=true")
FOREIGN: dict[str, tuple[str, str]] = {
    "interval": _INTERVAL,
    "fp8_interval": _INTERVAL,
    "batch_size": ("it would not say of what", "micro_batch_size (a GPU's forward pass) or global_batch_size (a step)"),
    "target_effective_batch_size": ("a step's sequences have a shorter name", "global_batch_size"),
    "effective_batch_size": ("a step's sequences have a shorter name", "global_batch_size"),
    "accumulate_grad_batches": ("it follows from the batch sizes", "global_batch_size / micro_batch_size / GPUs"),
    "gradient_accumulation_steps": ("it follows from the batch sizes", "global_batch_size / micro_batch_size / GPUs"),
    "trainer.precision": (_GROUP, "precision=bf16, fp32, fp8_hybrid, fp8_e4m3 or auto"),
    "dtype": (_GROUP, "precision=bf16, fp32, fp8_hybrid, fp8_e4m3 or auto"),
    "fp8_format": ("the format is the precision's name", "precision=fp8_hybrid or fp8_e4m3"),
    "use_fp8": (_GROUP, "precision=fp8_hybrid, or precision=bf16 without it"),
    "fp8": (_GROUP, "precision=fp8_hybrid, or precision=bf16 without it"),
    "first_last_layers_bf16": (_KEPT, "precision.keep_bf16='[first,last]'"),
    "num_layers_at_start_in_bf16": (_KEPT, "precision.keep_bf16='[first:2]'"),
    "num_layers_at_end_in_bf16": (_KEPT, "precision.keep_bf16='[last:2]'"),
    "override_linear_precision": ("it is about the backward's products", "precision.backward=bf16 or bf16_wgrad"),
    "fp8_recipe": ("recipes are a group of their own", "recipe=delayed, current, rowwise, block or mxfp8"),
    "use_muon": _OPTIMIZER,
    "optimizer_name": _OPTIMIZER,
    "optimizer_type": _OPTIMIZER,
    "optim.name": _OPTIMIZER,
    "optim.optimizer": _OPTIMIZER,
    "muon_lr": ("it has another name", "optimizer=muon optimizer.matrix_lr=VALUE"),
    "muon_momentum": ("it has another name", "optimizer=muon optimizer.momentum=0.95"),
    "learning_rate": ("it has a shorter name", "optim.lr"),
    "max_lr": ("it has a shorter name", "optim.lr"),
    "min_lr": ("it is given as a part of the peak", "optim.min_lr_ratio=0.1"),
    "betas": ("the two have a key each", "optim.beta1 and optim.beta2"),
    "wd": ("it has a longer name", "optim.weight_decay"),
    "lr_schedule": (_SCHEDULE, _SCHEDULES),
    "lr_scheduler": (_SCHEDULE, _SCHEDULES),
    "lr_scheduler_type": (_SCHEDULE, _SCHEDULES),
    "lr_decay_style": (_SCHEDULE, _SCHEDULES),
    "lr_decay_iters": ("cosine and linear decay until the end of the run", "trainer.max_steps"),
    "warmup": ("it is counted in steps", "optim.warmup_steps"),
    "warmup_iters": ("steps are optimizer steps", "optim.warmup_steps"),
    "num_epochs": ("it has Lightning's name", "trainer.max_epochs"),
    "epochs": ("it has Lightning's name", "trainer.max_epochs"),
    "num_train_epochs": ("it has Lightning's name", "trainer.max_epochs"),
    "train_tokens": ("it has another name", "trainer.max_tokens"),
    "max_iters": ("steps are optimizer steps", "trainer.max_steps"),
    "steps": ("steps are optimizer steps", "trainer.max_steps"),
    "gradient_clip_val": ("clipping belongs to the optimizer", "optim.max_grad_norm"),
    "grad_clip": ("clipping belongs to the optimizer", "optim.max_grad_norm"),
    "eval_interval": ("it has Lightning's name", "trainer.val_check_interval"),
    "eval_freq": ("validation is counted in steps", "trainer.val_check_interval"),
    "checkpoint_freq": ("it has another name", "callbacks.checkpoint_every_n_steps"),
    "save_interval": ("it has another name", "callbacks.checkpoint_every_n_steps"),
    "save_every": ("it has another name", "callbacks.checkpoint_every_n_steps"),
    "check_val_every_n_epoch": ("validation is counted in steps", "trainer.val_check_interval"),
    "limit_val_batches": ("validation is counted in sequences", "data.val_sequences"),
    "limit_train_batches": ("a run's length is counted in optimizer steps", "trainer.max_steps"),
    "eval_iters": ("validation is counted in sequences", "data.val_sequences"),
    "num_sanity_val_steps": ("nothing is validated before the first step", "leave it out"),
    "device": ("where a run computes is a group", "trainer=auto, cpu, gpu or ddp"),
    "gpus": ("it is Lightning's older word", "trainer.devices"),
    "nodes": ("it is Lightning's word", "trainer.num_nodes"),
    "enable_progress_bar": ("it is a callback", "callbacks.progress_bar"),
    "fp8_monitoring": ("it is a callback", "callbacks.fp8_health=true, the default"),
    "log_fp8_scales": ("it is a callback", "callbacks.fp8_health=true, the default"),
    "log_amax": ("it is a callback", "callbacks.fp8_health=true, the default"),
    "fp8_health_interval": ("it is counted in steps", "callbacks.fp8_health_every_n_steps"),
    "enable_checkpointing": ("checkpoints are a callback's", "callbacks.checkpoint_every_n_steps=0 (only at the end)"),
    "save_top_k": ("the best is always kept", "callbacks.keep_checkpoints (how many of the newest)"),
    "every_n_train_steps": ("checkpoints are a callback's", "callbacks.checkpoint_every_n_steps"),
    "resume": ("it has Lightning's name", "ckpt_path=last with the run_name to continue, or ckpt_path=FOLDER"),
    "resume_from": ("it has Lightning's name", "ckpt_path=last with the run_name to continue, or ckpt_path=FOLDER"),
    "resume_from_checkpoint": ("it has Lightning's name", "ckpt_path=last with the run_name to continue"),
    "checkpoint": ("two keys do this", "ckpt_path=FOLDER continues a run, init_from=FOLDER takes its weights alone"),
    "task_name": ("a run has one name", "run_name"),
    "output_dir": ("a run's folder is outputs/RUN_NAME", "run_name=NAME, or hydra.run.dir=FOLDER for elsewhere"),
    "paths": ("a run's folder is outputs/RUN_NAME", "run_name=NAME, or hydra.run.dir=FOLDER for elsewhere"),
    "out_dir": ("a run's folder is outputs/RUN_NAME", "run_name=NAME, or hydra.run.dir=FOLDER for elsewhere"),
    "block_size": ("it has GPT-2's name", "model.n_positions"),
    "seq_len": ("it has GPT-2's name", "model.n_positions"),
    "seq_length": ("it has GPT-2's name", "model.n_positions"),
    "context_length": ("it has GPT-2's name", "model.n_positions"),
    "max_length": ("it has GPT-2's name", "model.n_positions"),
    "max_seq_len": ("it has GPT-2's name", "model.n_positions"),
    "max_seq_length": ("it has GPT-2's name", "model.n_positions"),
    "sequence_length": ("it has GPT-2's name", "model.n_positions"),
    "model_max_length": ("it has GPT-2's name", "model.n_positions"),
    "n_ctx": ("it has GPT-2's name", "model.n_positions"),
    "context_size": ("it has GPT-2's name", "model.n_positions"),
    "hidden_size": ("it has GPT-2's name", "model.n_embd"),
    "d_model": ("it has GPT-2's name", "model.n_embd"),
    "num_layers": ("it has GPT-2's name", "model.n_layer"),
    "num_heads": ("it has GPT-2's name", "model.n_head"),
    "num_attention_heads": ("it has GPT-2's name", "model.n_head"),
    "num_hidden_layers": ("it has GPT-2's name", "model.n_layer"),
    "max_position_embeddings": ("it has GPT-2's name", "model.n_positions"),
    "num_key_value_heads": ("it has another name", "model.n_kv_head"),
    "num_query_groups": ("it has another name", "model.n_kv_head"),
    "num_gqa_groups": ("it has another name", "model.n_kv_head"),
    "kv_channels": ("it has another name", "model.head_size"),
    "head_dim": ("it has another name", "model.head_size"),
    "intermediate_size": ("it has another name", "model.mlp_width"),
    "ffn_hidden_size": ("it has another name", "model.mlp_width"),
    "hidden_act": ("it is the MLP's kind", "model.mlp=gelu or swiglu"),
    "activation": ("it is the MLP's kind", "model.mlp=gelu or swiglu"),
    "normalization": ("it has a shorter name", "model.norm=layer_norm or rms_norm"),
    "use_rmsnorm": ("it is a kind of normalisation", "model.norm=rms_norm"),
    "rms_norm_eps": ("every normalisation has the same", "model.norm_epsilon"),
    "layer_norm_epsilon": ("every normalisation has the same", "model.norm_epsilon"),
    "qk_layernorm": ("it has another name", "model.qk_norm=true"),
    "position_embedding_type": ("it has another name", "model.positions=learned or rope"),
    "rope_theta": ("it has another name", "model.rope_base"),
    "rotary_base": ("it has another name", "model.rope_base"),
    "tie_word_embeddings": ("it has another name", "model.tied_head=true or false"),
    "amax_compute": ("it has Transformer Engine's name", "recipe.amax_compute_algo=max or most_recent"),
    "amax_history": ("it has Transformer Engine's name", "recipe.amax_history_len"),
    "history_len": ("it has Transformer Engine's name", "recipe.amax_history_len"),
    "layers": ("it has been renamed", "precision.backend=auto, fused, te, torchao, reference or emulated"),
    "use_fast_accum": ("it has another name", "precision.fast_accumulation=true"),
    "split_accumulator": ("it has another name", "precision.fast_accumulation=false"),
    "input_bin": ("files are listed", "data=token_files data.train_files='[FOLDER/*_train_*.bin]'"),
    "input_val_bin": ("files are listed", "data.val_files='[FOLDER/*_val_*.bin]'"),
    "data_dir": ("files are listed", "data=text_files data.train_files='[FOLDER/*.txt]'"),
    "dataset": ("it is a group", "data=NAME"),
    "val_ratio": ("it has another name", "data.val_fraction"),
    "gradient_checkpointing": ("it has another name", "activation_checkpointing=full (whole blocks) or mlp"),
    "use_flash_attention": _ATTENTION,
    "use_flash_attn": _ATTENTION,
    "flash_attention": _ATTENTION,
    "attention_backend": _ATTENTION,
    "attention_type": _ATTENTION,
    "attn_implementation": _ATTENTION,
    "NVTE_FLASH_ATTN": _ATTENTION_OF_TE,
    "NVTE_FUSED_ATTN": _ATTENTION_OF_TE,
    "torch_compile_mode": ("it has a shorter name", "compile_mode=default or reduce-overhead"),
    "reset_attention_mask": _DOCUMENTS,
    "intra_document_mask": _DOCUMENTS,
    "document_masking": _DOCUMENTS,
    "penalty_weight": ("each penalty has a weight", "penalty.z_loss=1e-4, penalty.logit_l2 or penalty.activation_l1"),
    "penalty_lambda": ("each penalty has a weight", "penalty.z_loss=1e-4, penalty.logit_l2 or penalty.activation_l1"),
    "z_loss_weight": _Z_LOSS,
    "z_loss_multiplier": _Z_LOSS,
    "zloss": _Z_LOSS,
    "l1_lambda": _L1,
    "l1_weight": _L1,
    "use_compile": ("it has torch's name", "compile=true or false"),
    "use_wandb": _WANDB,
    "wandb": _WANDB,
    "wandb_log": _WANDB,
    "report_to": ("loggers are a group", "logger=[default,wandb], of csv, tensorboard, wandb and mlflow"),
    "wandb_project": ("it has a longer name", "logger=[default,wandb] logger.wandb.project=NAME"),
    "wandb_entity": ("it has a longer name", "logger=[default,wandb] logger.wandb.entity=NAME"),
    "wandb_run_name": ("every logger has the same", "run_name=NAME"),
    "logger.wandb.name": ("every logger has the same", "run_name=NAME"),
    "logger.wandb.id": ("a resumed run has that of the first", "run_name=NAME ckpt_path=last"),
    "logger.wandb.offline": ("it has another name", "logger=wandb logger.wandb.mode=offline"),
    "mlflow": _MLFLOW,
    "experiment_name": _MLFLOW,
    "log_histograms": ("it is an interval", "logger.histograms_every_n_steps=500"),
    "histogram_freq": ("it is an interval", "logger.histograms_every_n_steps=500"),
    "train": ("this program always trains", "remove the key"),
    "test": ("this program trains and validates", "remove the key"),
}

FOREIGN |= other_words.KEYS

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
REFUSED = {("precision", "fp8_e5m2")}  # choices that exist to say why they are refused, and are never advised

# Values that need more than a list of what is allowed.
VALUES = {
    "trainer.devices": "a number of GPUs or auto; which ones is CUDA_VISIBLE_DEVICES=0,1 in front of the command",
    "compile": "compile=true, false or auto",
    "compile_mode": "compile_mode=default or reduce-overhead",
    "cuda_graphs": "cuda_graphs=true, false or auto",
    "micro_batch_size": "a number of sequences that fits the GPU's memory: micro_batch_size=8",
    "precision.keep_bf16": "'precision.keep_bf16=[head,last]'",
    "bench.model": "'bench.model=[gpt2,gpt2_medium]'",
    "bench.precision": "'bench.precision=[bf16,fp8_hybrid]'",
    "bench.recipe": "'bench.recipe=[delayed,current]'",
    "bench.micro_batch_size": "'bench.micro_batch_size=[4,64]'",
}

# Where a class of data is told by its kind, the choices that have it; tests hold this against conf/data.
KINDS = {
    "stdlib": ("stdlib",),
    "files": ("text_files",),
    "token_files": ("token_files",),
    "hub": ("fineweb", "openwebtext", "slimpajama"),
    "file_or_hub": ("tinyshakespeare",),
    "registered": ("registered",),
    "mixture": ("mixture",),
}
OPTIMIZERS = ("adamw", "adamw_bf16", "adamw8bit", "muon")  # tests hold this against conf/optimizer
DEFAULTS = {"precision": "fp8_hybrid"}  # what is advised of several that have a key; otherwise the first of them


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


def foreign(path: str, value: object = None) -> tuple[str, str] | None:
    """Return cause and remedy for a name that people know from elsewhere, or None. `value`: what was typed for it."""
    plain = path.replace("-", "_")
    entry = FOREIGN.get(plain) or FOREIGN.get(plain.rpartition(".")[2])
    if entry is None:
        return None
    return f"there is no key {path}: {entry[0]}", other_words.with_value(plain.rpartition(".")[2], value) or entry[1]


def unknown_key(
    path: str,
    own: Sequence[str],
    everywhere: Iterable[str],
    owners: Sequence[str],
    tag: object,
    value: object = None,
) -> tuple[str, str]:
    """Return cause and remedy for a key that does not exist where it was put.

    Args:
        own: the names that do exist there.
        everywhere: all keys there are, as paths.
        owners: the choices of the same group that do have it.
        tag: the choice that was made.
        value: what was typed for it.
    """
    if told := foreign(path, value):
        return told
    group, _, leaf = path.rpartition(".")
    if owners:
        group = f"data@{group}" if group.startswith("data.sources.") else group
        theirs = [name for owner in owners for name in KINDS.get(owner, (owner,))]
        ours = either([f"{group}={name}" for name in KINDS.get(str(tag), (str(tag),))])
        listed = f" {path}='[FILE]'" if leaf in ("train_files", "val_files") else ""
        return (
            f"{path} belongs to {group}={either(theirs)}, and this run has {ours}",
            f"choose {group}={min(theirs, key=lambda name: name != DEFAULTS.get(group))}{listed}, or leave {path} out",
        )
    paths = list(everywhere)
    matches = [p for p in paths if p.rpartition(".")[2] == leaf]
    matches = matches or [f"{group}.{name}" if group else name for name in near(leaf, own, cutoff=0.75)]
    if not matches:
        named = {p.rpartition(".")[2]: p for p in paths} | {p: p for p in paths} | {g: g for g in _groups(paths)}
        matches = [named[name] for name in [*near(path, named, 1, 0.7), *near(leaf, named, 2, 0.7)]]
    if matches:
        return f"there is no key {path}", f"did you mean {either(list(dict.fromkeys(matches))[:3])}?"
    where = f"{group} has the keys" if group else "there are"
    return f"there is no key {path}", f"{where} {', '.join(own)}"


def _groups(paths: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(path.partition(".")[0] for path in paths if "." in path), "experiment", "debug"]


def unknown_choice(key: str, value: str, choices: Sequence[str]) -> tuple[str, str]:
    """Return cause and remedy for a choice that does not exist."""
    cause = f"{key}={value}: there is no such choice"
    if (ours := CHOICES.get(key, {}).get(value.lower())) in choices:
        return cause, f"{key}={ours}"
    if key == "data" and (files := as_files(value)):
        return f"{cause}, and files are listed", files
    choices = [choice for choice in choices if (key, choice) not in REFUSED]
    if typed := other_words.key_of_choice(key, value):
        return f"{cause}: it has a weight of its own", typed
    matches = near(value.removesuffix(".yaml"), choices, 1)
    matches = matches or [c for c in choices if value and (c.startswith(value) or value.startswith(c))]
    have = f"the choices are {', '.join(choices)}"
    if not matches and key == "optim" and (wanted := near(value, OPTIMIZERS, 1)):  # whose names lie near each other
        return f"{cause}: optim has rates and batch sizes, by the model's size", f"optimizer={wanted[0]}"
    if key == "experiment":
        have += "; one of your own in FOLDER/experiment/NAME.yaml: -cd FOLDER experiment=NAME"
    return cause, f"did you mean {key}={either(matches)}? ({have})" if matches else have


def as_files(value: str) -> str | None:
    """Return the words that read the files that `data=value` was meant to name; None if it names none."""
    kind = {"bin": "token_files"}.get(value.rpartition(".")[2], "text_files")
    if value.rpartition("/")[2].startswith("_"):  # a file that choices of this program are built upon
        return None
    named = "/" in value or value.endswith((".txt", ".jsonl", ".zst", ".parquet", ".bin"))
    return f"data={kind} data.train_files='[{value}]'" if named else None


def unknown_choice_of_group(group: str, groups: Sequence[str]) -> tuple[str, str]:
    """Return cause and remedy for a group that does not exist."""
    remedy = f"the groups are {', '.join(groups)}"
    if matches := near(group, groups):
        remedy = f"did you mean {matches[0]}? ({remedy})"
    return f"there is no group {group}", remedy
