"""Keys of other programs for the model and how it is computed: its shape, attention, FP8, penalties; what to type."""

from __future__ import annotations

_INTERVAL = ("Transformer Engine dropped it, and scales are updated every step now", "remove the key")
_GROUP = "precision is a group"
_KEPT = "layers are named, all of them in one list"
_ATTENTION = ("it has a shorter name", "attention=auto, sdpa, math, cudnn, flash or te")
_ATTENTION_OF_TE = (
    "it is Transformer Engine's, and stands in the environment",
    "attention=flash, cudnn, sdpa or te; or NAME=VALUE in front of the command, for attention=te",
)
_Z_LOSS = ("it is a penalty", "penalty.z_loss=1e-4")
_L1 = ("it is a penalty", "penalty.activation_l1=1e-4")
_NOT_GATHERED = ("every GPU has all weights, in float32, so none are gathered", "remove the key")
_DOCUMENTS = ("it has another name", "document_mask=true")
_SWIGLU = ("it is the MLP's kind", "model.mlp=swiglu")
_RMS_NORM = ("it is a kind of normalisation", "model.norm=rms_norm")
_ROPE = ("it is a kind of positions", "model.positions=rope")
_TIED = ("it has another name", "model.tied_head=true or false")
_RECOMPUTE = ("it has another name", "activation_checkpointing=full (whole blocks) or mlp")
_TE, _TORCHAO = ("it is a backend", "precision.backend=te"), ("it is a backend", "precision.backend=torchao")
_BIASES = ("it has another name", "model.bias=true or false")
_DELAYED = "it is delayed scaling's"
_KV_HEADS = ("it is a number of key-value heads", "model.n_kv_head=4")

KEYS: dict[str, tuple[str, str]] = {
    "interval": _INTERVAL,
    "fp8_interval": _INTERVAL,
    "trainer.precision": (_GROUP, "precision=bf16, fp32, fp8_hybrid or fp8_e4m3"),
    "bf16": (_GROUP, "precision=bf16"),
    "fp16": ("there is no float16, whose loss would need a scale", "precision=bf16"),
    "amp": (_GROUP, "precision=bf16, fp32, fp8_hybrid or fp8_e4m3"),
    "dtype": (_GROUP, "precision=bf16, fp32, fp8_hybrid or fp8_e4m3"),
    "fp8_format": ("the format is the precision's name", "precision=fp8_hybrid or fp8_e4m3"),
    "use_fp8": (_GROUP, "precision=fp8_hybrid, or precision=bf16 without it"),
    "fp8": (_GROUP, "precision=fp8_hybrid, or precision=bf16 without it"),
    "first_last_layers_bf16": (_KEPT, "precision.keep_bf16='[first,last]'"),
    "num_layers_at_start_in_bf16": (_KEPT, "precision.keep_bf16='[first:2]'"),
    "num_layers_at_end_in_bf16": (_KEPT, "precision.keep_bf16='[last:2]'"),
    "override_linear_precision": ("it is about the backward's products", "precision.backward=bf16 or bf16_wgrad"),
    "fp8_recipe": ("recipes are a group of their own", "recipe=delayed, current, rowwise, block or mxfp8"),
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
    **dict.fromkeys(("use_rmsnorm", "use_rms_norm", "rms_norm", "rmsnorm"), _RMS_NORM),
    "rms_norm_eps": ("every normalisation has the same", "model.norm_epsilon"),
    "layer_norm_epsilon": ("every normalisation has the same", "model.norm_epsilon"),
    "qk_layernorm": ("it has another name", "model.qk_norm=true"),
    "use_qk_norm": ("it has another name", "model.qk_norm=true"),
    "position_embedding_type": ("it has another name", "model.positions=learned or rope"),
    "rope_theta": ("it has another name", "model.rope_base"),
    "rotary_base": ("it has another name", "model.rope_base"),
    "tie_word_embeddings": _TIED,
    "amax_compute": ("it has Transformer Engine's name", "recipe.amax_compute_algo=max or most_recent"),
    "amax_history": ("it has Transformer Engine's name", "recipe.amax_history_len"),
    "history_len": ("it has Transformer Engine's name", "recipe.amax_history_len"),
    "layers": ("it has been renamed", "precision.backend=auto, fused, te, torchao, reference or emulated"),
    "use_fast_accum": ("it has another name", "precision.fast_accumulation=true"),
    "split_accumulator": ("it has another name", "precision.fast_accumulation=false"),
    **dict.fromkeys(("fp8_param_gather", "fp8_params", "fp8_param", "fp8_primary_weights"), _NOT_GATHERED),
    "gradient_checkpointing": _RECOMPUTE,
    "use_pytorch_sdpa": ("it is a kernel of attention", "attention=sdpa"),
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
    "gqa": _KV_HEADS,
    "use_gqa": _KV_HEADS,
    "num_kv_heads": _KV_HEADS,
    "n_kv_heads": _KV_HEADS,
    "group_query_attention": _KV_HEADS,
    "fp8_margin": (_DELAYED, "recipe=delayed recipe.margin=1"),
    "fp8_amax_history_len": (_DELAYED, "recipe=delayed recipe.amax_history_len=16"),
    "fp8_amax_compute_algo": (_DELAYED, "recipe=delayed recipe.amax_compute_algo=max or most_recent"),
    **dict.fromkeys(("tied", "tie_weights", "tie_embeddings", "weight_tying", "share_embeddings"), _TIED),
    **dict.fromkeys(("untied", "untie_embeddings_and_output_weights"), _TIED),
    **dict.fromkeys(("add_bias_linear", "disable_bias_linear"), _BIASES),
    **dict.fromkeys(("recompute", "recompute_activations", "recompute_granularity"), _RECOMPUTE),
    **dict.fromkeys(("use_te", "use_transformer_engine", "transformer_impl"), _TE),
    **dict.fromkeys(("use_torchao", "float8"), _TORCHAO),
    "use_rotary_position_embeddings": _ROPE,
    "rope": _ROPE,
    "use_rope": _ROPE,
    "rotary": _ROPE,
    "swiglu": _SWIGLU,
    "use_swiglu": _SWIGLU,
}
