"""Keys that people bring from other programs, or that the libraries once had: why they are none here, what to type."""

from __future__ import annotations

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
_DOCUMENTS = ("it has another name", "document_mask=true")
_SWIGLU = ("it is the MLP's kind", "model.mlp=swiglu")
_RMS_NORM = ("it is a kind of normalisation", "model.norm=rms_norm")
_ROPE = ("it is a kind of positions", "model.positions=rope")
_KV_HEADS = ("it is a number of key-value heads", "model.n_kv_head=4")

# Looked up by the whole path first, then by its last part.
KEYS: dict[str, tuple[str, str]] = {
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
    "gqa": _KV_HEADS,
    "use_gqa": _KV_HEADS,
    "num_kv_heads": _KV_HEADS,
    "n_kv_heads": _KV_HEADS,
    "rope": _ROPE,
    "use_rope": _ROPE,
    "rotary": _ROPE,
    "swiglu": _SWIGLU,
    "use_swiglu": _SWIGLU,
    "rms_norm": _RMS_NORM,
    "rmsnorm": _RMS_NORM,
    "use_rms_norm": _RMS_NORM,
}

_RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "tensorwise", "blockwise")
_CHOSEN_BY = {"fp8_recipe": "recipe"}  # keys whose value is a choice of a group
_COUNTED_BY = {name: "model.n_kv_head" for name, told in KEYS.items() if told is _KV_HEADS}


def advice(path: str, typed: object = None) -> tuple[str, str] | None:
    """Return cause and remedy for a key of another program, or None. `typed`: the value that it was given."""
    plain = path.replace("-", "_")
    leaf = plain.rpartition(".")[2]
    found = KEYS.get(plain) or KEYS.get(leaf)
    return found and (f"there is no key {path}: {found[0]}", _with_value(leaf, typed) or found[1])


def _with_value(name: str, typed: object) -> str | None:
    """Return what to type for a key that is none here, with the value that was typed; None if that does not fit."""
    if name in _CHOSEN_BY and typed in _RECIPES:
        return f"{_CHOSEN_BY[name]}={typed}"
    counted = isinstance(typed, int) and not isinstance(typed, bool) and typed > 0
    return f"{_COUNTED_BY[name]}={typed}" if name in _COUNTED_BY and counted else None
