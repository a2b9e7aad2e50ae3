"""Every refusal, as a careless user meets it: what is typed, and words of the cause and of the remedy."""

import itertools
import re
import shlex
from dataclasses import fields, replace
from functools import cache

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import backend_check, foreign_keys, hints, other_words
from gpt2_fp8.config.bench_schema import BenchConfig
from gpt2_fp8.config.checks import check, check_batch, value_of
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.precision_schema import PlainPrecisionConfig
from gpt2_fp8.config.schema import RunConfig
from tests.config.numbers import RANGES, ranges


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusals(line):
    with pytest.raises(UserError) as caught:
        preflight(shlex.split(line))
    return caught.value.problems


IDS = "data=token_files data.train_files=[/etc/passwd] data.val_sequences=0"
MIXED = "data=mixture +data@data.sources.a=fineweb +data@data.sources.b=openwebtext"
TABLE = [
    # numbers that do not fit together
    ("model.n_embd=100 model.n_head=3 precision=bf16", "the heads share", "model.n_embd=96, or model.n_head=2"),
    ("model.n_embd=96 model.n_head=5", "heads share n_embd", "model.n_embd=80, or model.n_head=4"),
    ("model.n_head=1000000000000 precision=bf16", "the heads share n_embd", "or model.n_head=128"),
    ("global_batch_size=999983 micro_batch_size=999982", "does not divide", "micro_batch_size=1, or glob"),
    ("trainer.max_steps=5 optim.warmup_steps=10", "optim.warmup_steps=10: the warm-up is", "optim.warmup_steps=0"),
    ("optim.schedule=constant", "optim.min_lr_ratio=0.1: the rate stays at the peak", "add optim.min_lr_ratio=1"),
    ("optim.schedule=linear optim.decay_steps=9", "it decays in all steps, or in none", "leave optim.decay_steps out"),
    ("optim.schedule=warmup_stable_decay", "optim.decay_steps=null: the steps at the end", "add optim.decay_steps=58"),
    ("optim.schedule=warmup_stable_decay optim.decay_steps=291", "the decay is longer", "optim.decay_steps=290 or"),
    ("optim.schedule=wsd", "must be cosine, linear, constant or warmup", "optim.schedule=warmup_stable_decay"),
    ("optim.schedule=trapezoidal", "must be cosine, linear", "optim.schedule=warmup_stable_decay"),
    ("optim.lr_schedule=linear", "there is no key optim.lr_schedule", "optim.schedule=cosine, linear"),
    # how long
    ("trainer.max_steps=null", "max_epochs=null: the learning rate needs an end", "give one: trainer.max_steps"),
    ("trainer.max_steps=null trainer.max_time=00:01:00:00", "needs an end of the run, in steps", "trainer.max_tokens="),
    ("trainer.max_tokens=4095", "trainer.max_tokens=4095: a step has 4,096 tokens", "trainer.max_tokens=4096 or more"),
    ("trainer.max_tokens=36864 optim.warmup_steps=10", "the warm-up is", "0, or trainer.max_tokens=40960"),
    ("trainer.max_tokens=1e6", "must be a whole number", "trainer.max_tokens=1000000"),
    ("trainer.max_epochs=0", "must be at least 1", "choose 1 or more"),
    ("data=fineweb trainer.max_epochs=1", "a hub's text is streamed", "as trainer.max_tokens=NUMBER"),
    ("data=tinyshakespeare trainer.max_epochs=1", "a hub's text is streamed", "trainer.max_epochs=null"),
    ("run_name=x ckpt_path=last debug=fdr", "trainer.fast_dev_run=true, ckpt_path=last: ", "leave one of them out; "),
    ("trainer.max_epochs=1 debug=overfit", "there are no passes over the text", "leave one of them out"),
    ("callbacks.keep_epochs=true", "no epochs are counted", "add trainer.max_epochs=NUMBER"),
    ("trainer.max_time=12h", "must be a time above 0, as days:hours", "trainer.max_time=00:12:00:00"),
    ("trainer.max_time=1h56m", "must be a time above 0", "trainer.max_time=00:01:56:00; in"),
    ("trainer.max_time=01:56:00", "must be a time above 0", "trainer.max_time=00:01:56:00; in"),
    ("trainer.max_time=1-12:00:00", "must be a time above 0", "trainer.max_time=01:12:00:00; in"),
    ("trainer.max_time=00:00:00", "must be a time above 0", "such as trainer.max_time="),
    ("trainer.max_time=00:00:00:00", "must be a time above 0", "such as trainer.max_time="),
    ("trainer.max_time=3600", "trainer.max_time=3600: must be a time", "in a file in quotes"),
    ("global_batch_size=12", "12 sequences does not divide", "micro_batch_size=12, or global_batch_size=16"),
    ("trainer.devices=8 micro_batch_size=16", "16 on each of 8 devices", "micro_batch_size=2, or glob"),
    ("trainer=ddp global_batch_size=7", "7 sequences does not divide", "micro_batch_size=7"),
    ("trainer.num_nodes=3", "does not divide", "global_batch_size=48"),
    ("trainer.num_nodes=2", "MASTER_ADDR, MASTER_PORT and NODE_RANK are not set", "torchrun --nnodes 2"),
    ("data.tokenizer=gpt2 model.vocab_size=50000", "the tokenizer has 50257 tokens", "model.vocab_size=null"),
    ("model.vocab_size=256", "the tokenizer has 257 tokens", "model.vocab_size=null"),
    # a model's options
    ("model.n_kv_head=3", "model.n_head=4, model.n_kv_head=3: each key-value head serves", "model.n_kv_head=2"),
    ("model.n_kv_head=8", "model.n_head=4, model.n_kv_head=8", "model.n_kv_head=4"),
    ("model.n_kv_head=0", "model.n_kv_head=0: must be at least 1", "choose 1 or more"),
    ("model.positions=rope model.head_size=7 precision=bf16", "a head has 7", "model.head_size=8"),
    ("model.positions=rope model.n_embd=12 precision=bf16", "n_head=4: RoPE turns pairs", "model.head_size=4"),
    ("model.positions=rope model.head_size=33", "RoPE turns pairs of channels, and a head has 33", "head_size=32"),
    ("model.rope_base=1e6", "learned has no rotations", "model.positions=rope, or model.rope_base=null"),
    ("model.rope_scaling=8", "model.positions=learned has no rotations", "or model.rope_scaling=null"),
    ("model=llama3_small model.rope_low_freq_factor=1", "also needs model.rope_high_freq_factor and", "add model.rope"),
    ("model=llama3_2_1b model.rope_scaling=null", "scaling also needs model.rope_scaling", "rope_scaling=32, or m"),
    ("model=llama3_2_1b model.positions=learned", "learned has no rotations", "or model.rope_base=null model.rope_sc"),
    ("model=llama3_2_1b model.rope_low_freq_factor=4", "low factor is below the high", "rope_high_freq_factor=16"),
    ("model.positions=rope model.rope_scaling=0.5", "model.rope_scaling=0.5: must be at least 1", "choose 1 or more"),
    ("model.positions=rope model.rope_base=0", "model.rope_base=0.0: must be above 0", "choose a value above 0"),
    ("model.norm_epsilon=0", "model.norm_epsilon=0.0: must be above 0 and at most 1", "such as 1e-5"),
    ("model.norm=rmsnorm", "must be layer_norm or rms_norm", "model.norm=rms_norm"),
    ("model.mlp=swigl", "must be gelu or swiglu", "model.mlp=swiglu"),
    ("model.positions=alibi", "must be learned or rope", "model.positions=learned, or model.positions=rope"),
    ("model.mlp_width=500", "model.mlp_width=500: FP8 matrix products need a multiple of 16", "model.mlp_width=496"),
    ("model.head_size=6", "the queries have 24 channels", "model.head_size=8, or precision=bf16"),
    ("model.head_size=4 model.n_kv_head=1", "the keys and values have 8 channels", "model.head_size=8, or"),
    ("precision.backend=fused model.norm=rms_norm", "they have no RMSNorm", "auto, or model.norm=layer_norm"),
    ("precision.backend=fused model.n_kv_head=2", "no grouped-query", "backend=auto, or model.n_kv_head=4"),
    ("precision.backend=fused model.head_size=80", "no head size other", "backend=auto, or model.head_size="),
    ("precision.backend=fused model=gpt2_optimized", "no grouped", "or model.n_kv_head=12 model.norm=layer_norm"),
    ("precision.backend=fused model=llama3_small", "no RMSNorm, no SwiGLU MLP, no RoPE, no grouped", "backend=auto"),
    ("cuda_graphs=true model.qk_norm=true", "they have no QK-norm", "cuda_graphs=auto"),
    ("precision.fast_accumulation=true model.tied_head=false", "no head that is not tied", "leave precision.fast"),
    ("model.rope_theta=1e6", "there is no key model.rope_theta: it has another name", "model.rope_base"),
    ("model.num_key_value_heads=2", "there is no key model.num_key_value_heads", "model.n_kv_head"),
    ("model.normalization=RMSNorm", "it has a shorter name", "model.norm=layer_norm or rms_norm"),
    # FP8
    ("precision=fp8_e5m2", "E5M2 x E5M2", "precision=fp8_hybrid"),
    ("model.n_embd=100", "FP8 matrix products need a multiple of 16", "model.n_embd=96, or precision=bf16"),
    ("model.n_embd=100 precision.backend=torchao", "need a multiple of 16", "or precision=bf16 precision.backend=auto"),
    ("model.n_positions=100 precision.backend=fused", "multiple of 16", "or precision=bf16 precision.backend=auto"),
    ("model.n_positions=100 micro_batch_size=1", "multiple of 16", "model.n_positions=96, or precision=bf16"),
    ("recipe=mxfp8 model.n_embd=144 model.n_head=3", "of recipe=mxfp8 need a multiple of 32", "n_embd=192, or"),
    ("recipe=mxfp8 model.n_embd=112", "n_embd=112: the FP8 matrix products of recipe=mxfp8", "model.n_embd=128"),
    ("recipe=mxfp8 model.mlp_width=496", "mlp_width=496: the FP8 matrix products of recipe=mxfp8", "mlp_width=512"),
    ("recipe=mxfp8 model.n_head=1 model.head_size=80", "the queries have 80 channels", "model.head_size=64"),
    ("recipe=mxfp8 model.head_size=24 model.n_kv_head=1", "the keys and values have 48 channels", "head_size=32, or"),
    ("recipe=mxfp8 model.n_positions=240", "recipe=mxfp8 need sequences of a multiple of 32", "n_positions=256"),
    ("recipe=block model.n_head=1 model.head_size=40", "the queries have 40 channels", "model.head_size=32, or prec"),
    ("recipe=block model.head_size=4 model.n_kv_head=1", "the keys and values have 8 channels", "head_size=8, or"),
    ("recipe=blockwise model.n_embd=200", "n_embd=200: FP8 matrix products need a multiple of 16", "model.n_embd=192"),
    ("precision.keep_bf16=[blocks.4]", "no layer blocks.4 in a model of 4 blocks", "blocks.0 to blocks.3"),
    ("precision.keep_bf16=[head,1F1L]", "there is no layer 1F1L", "precision.keep_bf16='[head,first:1,last:1]'"),
    ("precision.keep_bf16=[heads]", "no layer heads", "head, first, last"),
    ("precision.keep_bf16=[first:5]", "no layer first:5 in a model of 4 blocks", "first:2"),
    ("precision.backend=fused precision.keep_bf16=[blocks.1.qkv]", "names a part of blocks.1", "backend=auto"),
    ("precision.backend=fused precision.keep_bf16=[blocks.*.fc1]", "names a part of blocks.0", "backend=auto"),
    ("recipe=delayed precision.backward=bf16_wgrad", "no backend can do this in FP8", "recipe=current, or precision"),
    ("precision.backend=fused penalty.logit_l2=0.1", "z_loss alone, and this is penalty.logit_l2=0.1", "backend=auto"),
    (
        "precision.backend=fused penalty.logit_l2=0.1 penalty.activation_l1=1",
        "this is penalty.logit_l2=0.1 and penalty.activation_l1=1",
        "precision.backend=auto",
    ),
    ("cuda_graphs=true penalty.activation_l1=0.1", "of the penalties they have z_loss alone", "cuda_graphs=auto"),
    ("penalty.z_loss=-1", "penalty.z_loss=-1.0: must not be negative", "choose 0 or more"),
    ("penalty.z_loss=inf", "penalty.z_loss=inf: not a finite number", "penalty.z_loss=NUMBER"),
    ("penalty_weight=0.1", "each penalty has a weight", "penalty.z_loss=0.1, p"),
    ("z_loss_weight=0.1", "it is a penalty", "penalty.z_loss=0.1"),
    ("l1_lambda=0.1", "it is a penalty", "penalty.activation_l1=0.1"),
    ("z_loss=0.1", "there is no key z_loss", "penalty.z_loss"),
    ("penalty=L1", "penalty=L1: there is no such choice: it has a weight", "penalty.activation_l1=1e-4"),
    ("penalty=logit_l2", "there is no such choice: it has a weight of its own", "penalty.logit_l2=1e-4"),
    ("penalty=l2", "there is no such choice", "penalty.logit_l2=1e-4"),
    ("penalty=kl", "there is no such choice", "none, z_loss"),
    ("num_layers_at_start_in_bf16=1", "all of them in one list", "precision.keep_bf16='[first:1]'"),
    ("num_layers_at_end_in_bf16=3", "all of them in one list", "precision.keep_bf16='[last:3]'"),
    ("num_layers_at_end_in_bf16=0", "layers are named", "leave it out"),
    ("--num-layers-at-start-in-bf16=1", "is not a flag", "precision.keep_bf16='[first:1]'"),
    ("fp8_param_gather=true", "in float32, so none are gathered", "remove the key"),
    ("model.fp8_param_gather=true", "in float32, so none are gathered", "remove the key"),
    ("use_pytorch_sdpa=True", "it is a kernel of attention", "attention=sdpa"),
    ("use_pytorch_sdpa=false", "it is a kernel of attention", "attention=auto"),
    ("use_qk_norm=true", "it has another name", "model.qk_norm=true"),
    ("use_qk_norm=false", "it has another name", "model.qk_norm=false"),
    ("use_tensorboard=true", "it is a choice of logger", "remove the key"),
    ("use_tensorboard=false", "it is a choice of logger", "logger=csv"),
    ("no_wandb=true", "W&B is a choice of logger", "remove the key"),
    ("no_wandb=false", "W&B is a choice of logger", "logger=[default,wandb]"),
    ("auto_batch_size=true", "it is a value of the size", "micro_batch_size=auto"),
    ("auto_batch_size=false", "it is a value of the size", "micro_batch_size=8"),
    ("checkpoint_dir=./checkpoints_fp8/", "checkpoints are in the run's folder", "hydra.run.dir=FOLDER"),
    ("wandb_name=openwebtext_fp8", "every logger has the same", "run_name=openwebtext_fp8"),
    ("wandb_project=fp8", "it has a longer name", "logger=[default,wandb] logger.wandb.project=fp8"),
    ("wandb_project=me/fp8", "it has a longer name", "logger.wandb.project=NAME"),
    ("tensor_parallel=2", "every GPU has the whole model", "trainer=ddp, or remove the key"),
    ("tie_word_embeddings=false", "it has another name", "model.tied_head=false"),
    ("split_accumulator=true", "it has another name", "precision.fast_accumulation=false"),
    ("muon_lr=0.02", "it has another name", "optimizer=muon optimizer.matrix_lr=0.02"),
    ("muon_momentum=1.5", "it has another name", "optimizer=muon optimizer.momentum=0.95"),
    ("fp8_recipe=tensorwise", "recipes are a group of their own", "recipe=tensorwise"),
    ("fp8_recipe=hybrid", "recipes are a group of their own", "recipe=delayed, current"),
    ("model.gqa=2", "it is a number of key-value heads", "model.n_kv_head=2"),
    ("model.use_gqa=true", "it is a number of key-value heads", "model.n_kv_head=4"),
    ("model.rope=true", "it is a kind of positions", "model.positions=rope"),
    ("model.use_swiglu=true", "it is the MLP's kind", "model.mlp=swiglu"),
    ("model.rms_norm=true", "it is a kind of normalisation", "model.norm=rms_norm"),
    (
        "penalty.activation_l1=1 recipe=delayed precision.backward=bf16_wgrad",
        "no backend can do this in FP8",
        "recipe=current, or precision.backward=fp8",
    ),
    ("precision.backend=fused precision.backward=bf16", "their backward is in FP8", "precision.backend=auto"),
    ("precision.backend=te precision.backward=bf16_wgrad", "in FP8 or none", "precision.backend=torchao (pip"),
    ("precision.backward=bf16 recipe=delayed", "has no backward in bf16 (recipe=current", "recipe=current, or prec"),
    ("precision=bf16 precision.backward=bf16", "belongs to precision=fp8_", "or leave precision.backward out"),
    ("precision.backward=bf8", "must be fp8, bf16 or bf16_wgrad", "precision.backward=fp8"),
    (
        "precision.backend=te precision.keep_bf16=[first:2,head,last:2] model.n_layer=4",
        "it keeps every layer in bf16",
        "leave precision.keep_bf16 out",
    ),
    (
        "precision.keep_bf16=[heads,blocks.*]",
        "there is no layer heads",
        "precision.keep_bf16='[head]'",
    ),
    (
        "precision.fast_accumulation=true precision.keep_bf16=[blocks.*]",
        "it is for the blocks, and precision.keep_bf16 keeps each of them in bf16",
        "leave precision.fast_accumulation out",
    ),
    ("precision.keep_bf16=head", "needs a list", "precision.keep_bf16='[head]'"),
    ("precision=auto", "precision=auto: there is no such choice", "fp8_hybrid"),
    ("precision.keep_bf16=[heads]", "no layer heads", "head, first, last"),
    ("recipe.margin=1", "recipe.margin belongs to recipe=delayed", "choose recipe=delayed"),
    # how it computes
    ("precision.backend=fuse", "must be auto, fused, te, torchao, reference or emulated", "precision.backend=fused"),
    ("precision.backend=reference", "plain torch has no FP8 GEMMs", "precision.backend=auto, or precision=bf16, or"),
    ("precision.backend=reference model=llama3_small", "plain torch has no FP8 GEMMs", "auto, or precision=bf16"),
    ("precision.backend=reference precision.fallback=error", "no FP8 GEMMs", "precision.backend=auto, or precision.b"),
    ("precision.backend=fused model=gpt2_optimized", "they have no RMSNorm, no grouped", "precision.backend=auto"),
    ("precision=bf16 precision.backend=fused", "its kernels are for FP8", "precision.backend=auto"),
    ("precision=fp32 precision.backend=te", "for FP8 and bf16 here", "precision.backend=auto"),
    ("precision.backend=fused recipe=current", "scaling alone, not recipe=current", "backend=auto, or recipe=delayed"),
    ("precision.backend=fused document_mask=true", "their attention has no mask", "or document_mask=false, or"),
    ("precision.backend=fused penalty.logit_l2=1e-4", "they have z_loss alone", "or penalty.logit_l2=0, or"),
    ("precision.backend=fused precision.keep_bf16=[blocks.1.mlp,head]", "a part of blocks.1", "'[blocks.1,head]', or"),
    ("precision.backend=fused recipe=block document_mask=true", "not recipe=block", "delayed document_mask=false, or"),
    ("precision.backend=fused model.dropout=0.1", "no dropout, and model.dropout=0.1", "precision.backend=auto"),
    ("precision=bf16 precision.backend=torchao", "it is for FP8, and this is precision=bf16", "backend=auto"),
    ("precision.backend=torchao recipe=delayed", "not recipe=delayed", "recipe=current, or recipe=rowwise"),
    ("precision.backend=torchao recipe=block", "not recipe=block", "recipe=current, or recipe=rowwise"),
    ("precision.backend=torchao recipe=mxfp8", "not recipe=mxfp8", "recipe=current, or recipe=rowwise"),
    ("precision.backend=torchao attention=te", "this run has plain-torch layers", "attention=cudnn"),
    ("precision.backend=torchao cuda_graphs=true", "this is precision.backend=torchao", "cuda_graphs=auto"),
    ("precision.backend=fused recipe=rowwise", "delayed scaling alone, not recipe=rowwise", "backend=torchao (pip"),
    ("precision.backend=te recipe=rowwise", "it has no scale a row", "precision.backend=torchao (pip"),
    ("precision.backend=emulated recipe=rowwise", "not recipe=rowwise", "precision.backend=torchao (pip"),
    ("precision=bf16 precision.backend=emulated", "it emulates FP8, and this is", "precision.backend=auto"),
    ("precision.backend=emulated recipe=mxfp8", "delayed, current and block, not", "precision.backend=auto"),
    ("precision.backend=emulated cuda_graphs=true", "and this is precision.backend=emulated", "cuda_graphs=auto"),
    ("precision.backend=emulated precision.fast_accumulation=true", "only the fused FP8", "leave precision.fast"),
    ("cuda_graphs=true precision=bf16", "and this is precision=bf16", "cuda_graphs=auto"),
    ("cuda_graphs=true precision.backend=te", "and this is precision.backend=te", "cuda_graphs=auto"),
    ("cuda_graphs=true recipe=block", "not recipe=block", "cuda_graphs=auto"),
    ("precision.fast_accumulation=true precision.backend=te", "this is precision.backend=te", "leave precision.fast"),
    ("precision.fast_accumulation=true recipe=current", "not recipe=current", "leave precision.fast"),
    ("precision.fast_accumulation=true model.dropout=0.1", "they have no dropout", "leave precision.fast"),
    ("cuda_graphs=yes", "true or false or auto", "cuda_graphs=true, false or auto"),
    ("activation_checkpointing=true", "must be none, mlp or full", "activation_checkpointing=full"),
    ("activation_checkpointing=selective", "must be none, mlp or full", "activation_checkpointing=mlp"),
    ("precision.backend=transformer_engine", "must be auto, fused, te", "precision.backend=te"),
    ("document_mask=true precision.backend=fused", "their attention has no mask", "precision.backend=auto"),
    ("document_mask=true cuda_graphs=true", "their attention has no mask", "cuda_graphs=auto"),
    ("document_mask=true attention=cudnn", "it takes no mask", "attention=sdpa, or leave attention out"),
    ("document_mask=true attention=te", "it takes no mask", "attention=sdpa, or leave attention out"),
    ("intra_document_mask=true", "it has another name", "document_mask=true"),
    ("compile_mode=reduce-overhead", "and this is precision=fp8_hybrid", "compile_mode=default"),
    ("compile_mode=reduce-overhead precision=bf16 precision.backend=te", "backend=te", "compile_mode=default"),
    ("compile_mode=reduce-overhead precision=bf16 trainer=cpu", "trainer.accelerator=cpu", "compile_mode=default"),
    ("compile_mode=reduce-overhead precision=bf16 compile=false", "this is compile=false", "compile_mode=default"),
    ("compile_mode=reduce-overhead precision=bf16 model.dropout=0.1", "model.dropout=0.1", "compile_mode=default"),
    ("compile_mode=max-autotune", "must be default or reduce-overhead", "compile_mode=default or reduce-overhead"),
    ("torch_compile_mode=default", "it has a shorter name", "compile_mode=default or reduce-overhead"),
    ("attention=cudnn trainer=cpu", "and this is trainer.accelerator=cpu", "attention=auto"),
    ("attention=flash precision=fp32 trainer=gpu", "and this is precision=fp32", "attention=sdpa, or precision=bf16"),
    ("attention=te precision=bf16", "this run has plain-torch layers", "attention=cudnn (torch's call of"),
    ("attention=te precision.backend=emulated", "has plain-torch layers", "or precision.backend=te, or leave att"),
    ("attention=te precision=bf16 trainer.deterministic=true", "which call torch's attention", "attention=sdpa, or"),
    ("attention=te precision=fp32", "its kernels take bfloat16", "attention=sdpa"),
    ("attention=cudnn trainer.deterministic=true", "is not deterministic", "attention=auto, or leave"),
    ("attention=plain", "must be auto, sdpa, math, cudnn, flash or te", "attention=math"),
    ("attention=xyz", "must be auto, sdpa", "attention=auto, or attention=sdpa, or attention=math"),
    ("use_flash_attention=true", "it has a shorter name", "attention=auto, sdpa, math, cudnn, flash or te"),
    ("model.attn_implementation=sdpa", "it has a shorter name", "attention=auto, sdpa, math, cudnn, flash or te"),
    ("attention_backend=fused", "it has a shorter name", "attention=auto, sdpa, math, cudnn, flash or te"),
    ("NVTE_FLASH_ATTN=0", "stands in the environment", "attention=flash"),
    ("layers=te", "there is no key layers: it has been renamed", "precision.backend=auto, fused, te"),
    ("precision.layers=te", "there is no key precision.layers: it has been renamed", "precision.backend=auto, fused"),
    ("cudagraphs=true", "there is no key cudagraphs", "did you mean cuda_graphs?"),
    ("optimizer=adam", "there is no such choice", "did you mean optimizer=adamw?"),
    ("optimizer=adamw8bit", "there is no such choice", "optimizer=adamw"),
    ("optim=adamw", "optim has rates and batch sizes", "optimizer=adamw"),
    ("optim=muon", "optim has rates and batch sizes", "optimizer=muon"),
    ("use_muon=true", "optimizer is a group", "optimizer=adamw, adamw_bf16 or muon"),
    ("optimizer.name=muon", "this is chosen with the whole group", "optimizer=muon"),
    ("optimizer.momentum=0.9", "belongs to optimizer=muon, and this run has optimizer=adamw", "choose optimizer=muon"),
    ("optimizer.lr=1e-3", "there is no key optimizer.lr", "did you mean optim.lr?"),
    ("optimizer=muon optimizer.weight_decay=0", "there is no key", "did you mean optim.weight_decay?"),
    ("optimizer=muon optimizer.momentum=1", "must be at least 0 and below 1", "a value such as"),
    ("optimizer=muon optimizer.ns_steps=0", "must be from 1 to 99", "choose 5"),
    ("optimizer=muon optimizer.matrix_lr=0", "must be above 0", ""),
    ("gradient_checkpointing=true", "it has another name", "activation_checkpointing=full"),
    # keys and choices that are not there
    ("recipe=current recipe.margin=1", "belongs to recipe=delayed, and this run has recipe=current", "recipe=delayed"),
    ("precision=bf16 precision.fallback=error", "belongs to precision=fp8_hybrid", "choose precision=fp8_hybrid"),
    ("data.path=x.txt", "belongs to data=tinyshakespeare, and this run has data=stdlib", "data=tinyshakespeare"),
    ("recipe.interval=1", "Transformer Engine dropped it", "remove the key"),
    ("+recipe.interval=1", "scales are updated every step now", "remove the key"),
    ("precision.fp8_interval=1", "Transformer Engine dropped it", "remove the key"),
    ("model=gpt3", "model=gpt3: there is no such choice", "did you mean model=gpt2?"),
    ("precision=bf16-mixed", "no such choice", "precision=bf16"),
    ("precision=fp8", "no such choice", "precision=fp8_hybrid"),
    ("logger=comet", "logger=comet", "csv, default, mlflow, none, tensorboard, wandb"),
    ("logger.wandb.project=x", "this logger is not chosen", "logger=[default,wandb]"),
    ("logger.wandb=true", "not a group of keys", "logger=[default,wandb]"),
    ("wandb=true", "W&B is a choice of logger", "logger=[default,wandb]"),
    ("logger=csv logger.histograms_every_n_steps=5", "only TensorBoard and W&B", "logger=default"),
    ("logger=wandb logger.wandb.project=me/gpt2", "W&B refuses", "logger.wandb.project=me-gpt2"),
    ("logger=mlflow logger.mlflow.tracking_uri=here", "no address that MLflow knows", "sqlite:///FILE"),
    ("experiment=fineweb_edu_fp8.yaml", "no such choice", "experiment=fineweb_edu_fp8?"),
    ("model=null", "model=null", "gpt2_large"),
    ("model=", "model=''", "gpt2_large"),
    ("foo/bar=x", "there is no group foo/bar", "the groups are callbacks"),
    ("model@encoder=gpt2", "one place here", "model=CHOICE"),
    ("lr=1e-3", "there is no key lr", "optim.lr"),
    ("max_steps=10", "there is no key max_steps", "trainer.max_steps"),
    ("batch_size=8", "there is no key batch_size", "micro_batch_size"),
    ("trainer.precision=bf16", "there is no key trainer.precision", "precision=bf16"),
    ("trainer.accumulate_grad_batches=4", "follows from the batch sizes", "global_batch_size / micro_batch_size"),
    ("optm.lr=1", "there is no key optm", "did you mean optim?"),
    ("MODEL=gpt2", "there is no key MODEL", "did you mean model?"),
    ("model.nlayer=2", "there is no key model.nlayer", "model.n_layer"),
    ("seed.x=1", "seed is a single value", "seed=VALUE"),
    ("recipe.name=current", "chosen with the whole group", "recipe=current"),
    ("'model={n_layer: 2}'", "model takes a choice, not keys", "model.KEY=VALUE"),
    ("model._target_=os.system", "nothing here is built", "--help"),
    # types
    ("seed=x", "seed=x: must be a whole number", "seed=NUMBER"),
    ("trainer.max_steps=1e4", "whole number", "trainer.max_steps=10000"),
    ("optim.lr=nan", "not a finite number", "optim.lr=NUMBER"),
    ("model.bias=yes", "true or false", "model.bias=true"),
    ("precision.fallback=alow", "allow or error", "precision.fallback=allow"),
    ("trainer.devices=[0,1]", "a whole number or auto", "CUDA_VISIBLE_DEVICES=0,1"),
    ("data=text_files data.train_files=/x/*.txt", "needs a list", "data.train_files='[/x/*.txt]'"),
    # words that Hydra cannot read
    ("--lr 0.1", "--lr is not a flag", "optim.lr=0.1"),
    ("--max-steps=100", "--max-steps=100 is not a flag", "trainer.max_steps=100"),
    ("--model gpt2", "--model is not a flag", "model=gpt2"),
    ("--frobnicate", "is not a flag", "--help"),
    ("model = gpt2", "blanks around =", "model=gpt2"),
    ("model: gpt2", "not of the form key=value", "model=gpt2"),
    ("gpt2", "gpt2 is not of the form key=value", "--help"),
    ("callbacks.sample_prompt=O Romeo", "Romeo stands alone", "'callbacks.sample_prompt=\"O Romeo\"'"),
    ("'callbacks.sample_prompt=Hello!'", "cannot be read", "'callbacks.sample_prompt=\"Hello!\"'"),
    ("data.train_files=[a,b", "cannot be read", "'data.train_files=[a,b]'"),
    ("model={n_layer: 2}", "the shell split it", "'model={n_layer: 2}'"),
    ("seed=1,2", "several values, and this is a single run", "-m runs each"),
    ("recipe=delayed,current", "several values", "-m"),
    ("model=gpt2 -m seed=1,2", "comes after a flag", "-m model=gpt2 seed=1,2"),
    ("-m 'optim.lr=interval(1,2)'", "an interval", "1e-4,3e-4"),
    ("-m 'experiment=glob(zz*)'", "matches nothing", "--help"),
    ("-m hydra.job.name=a,b", "not swept over", "one value"),
    ("+seed=3", "seed has a value already", "seed=3, without the +"),
    ("+experiment=fineweb_edu_fp8", "has its place already", "experiment=fineweb_edu_fp8, without the +"),
    ("~model", "one choice of model", "leave ~model out"),
    ("~trainer.profiler", "every key has a value", "trainer.profiler=null"),
    ("'optim.lr=${nope}'", "optim.lr: Interpolation key 'nope' not found", "correct"),
    # Hydra's own
    ("hydra.callbacks.x._target_=os.system", "what Hydra builds", "_target_"),
    ("hydra.job_logging.root.handlers=[x]", "not a setting of Hydra's that this program leaves open", "hydra.verbose"),
    ("hydra.job_logging.root.level=LOUD", "the level LOUD is none of", "hydra.job_logging.root.level=DEBUG"),
    ("'hydra.sweeper={_target_: os.system}'", "what Hydra builds", "_target_"),
    ("'hydra.launcher.x={_target_: os.system}'", "what Hydra builds", "_target_"),
    ("hydra/callbacks=x", "not a setting", "hydra/launcher"),
    ("hydra/launcher=ray", "no such choice", "pip install hydra-ray-launcher"),
    ("hydra/sweeper=optuna", "no such choice", "pip install hydra-optuna-sweeper"),
    ("hydra/job_logging=colorlog", "no such choice", "pip install hydra-colorlog"),
    ("hydra/sweeper=optna", "no such choice", "did you mean hydra/sweeper=optuna?"),
    ("hydra.sweeper.params.seed=1", "cannot be composed", "-m KEY=VALUE,VALUE"),
    ("hydra.launcher.n_jobs=2", "cannot be composed", "leave out hydra.launcher.n_jobs=2"),
    ("hydra.job.chdir=maybe", "cannot be composed", "leave out hydra.job.chdir=maybe"),
    ("--config-path x", "hide this program's own settings", "-cd FOLDER"),
    ("--experimental-rerun x", "unpickle", "overrides.yaml"),
    ("-cn nope", "--config-name=nope", "config"),
    ("-cd nope", "there is no folder", "-cd FOLDER"),
    ("-m trainer=ddp seed=1,2", "each process would start the whole sweep again", "trainer=gpu"),
    ("-m trainer.devices=2 seed=1,2 global_batch_size=32", "the whole sweep again", "without -m"),
    # paths
    ("data=text_files", "data.train_files is empty", "data.train_files='["),
    ("data=text_files data.train_files=[nope/*.txt]", "nope/*.txt matches no file", "correct the path"),
    ("data=text_files data.train_files=[nope.txt]", "nope.txt does not exist", "correct the path"),
    ("data=token_files data.val_sequences=0", "data.train_files is empty", "data.train_files='[/corpus/*_train_*.bin"),
    ("data=token_files data.train_files=[/etc/passwd]", "nothing to validate on", "data.val_files='["),
    (f"{IDS} data.headerless=uint8", "must be uint16 or uint32", "data.headerless=uint32"),
    (f"{IDS} data.cache_dir=x", "data.cache_dir belongs to", "or leave data.cache_dir out"),
    (f"{IDS} input_bin=x", "there is no key input_bin", "data=token_files"),
    ("data=mixture", "mixes two sources or more, and has none", "+data@data.sources.web=fineweb"),
    ("data=mixture +data@data.sources.a=stdlib", "and has 1", "a single one is data=stdlib"),
    ("data=mixture data@data.sources.a=fineweb +data@data.sources.b=openwebtext +data@data.sources.c=slimpajama",
     "no file that was chosen has data.sources.a", "+data@data.sources.a=fineweb, to add it"),
    (f"{MIXED} +data@data.sources.c=finewebb", "data=finewebb: there is no such choice", "did you mean data=fineweb?"),
    (f"{MIXED} +data@data.sources.c=mixture", "data.sources.c.kind=mixture: there is no", "the choices are"),
    (f"{MIXED} +data@elsewhere=fineweb", "no such place for a choice of data", "+data@data.sources.NAME=CHOICE"),
    (f"{MIXED} +model@data.sources.c=tiny", "a group has one place here", "without @data.sources.c"),
    (f"{MIXED} data.weights={{a:0,b:1}}", "a: 0 gives nothing", "leave the source a out"),
    (f"{MIXED} data.weights={{a:-1,b:1}}", "a: -1 is below 0", "a number above 0"),
    (f"{MIXED} data.weights={{a:1}}", "b has none", "data.weights='{a: 1, b: 1}'"),
    (f"{MIXED} data.weights={{a:1,b:1,c:1}}", "there is no source c", "data.weights='{a: 1, b: 1}'"),
    (f"{MIXED} data.weights={{a:1,b:x}}", "data.weights.b=x: must be a number", "++data.weights.b=NUMBER"),
    (f"{MIXED} data.weights={{a:1,b:1e9}}", "a would give less than a sequence in a million", "a larger weight"),
    (f"{MIXED} data.weights=7", "data.weights=7: must be", "data.weights="),
    (f"{MIXED} data.sources.b.tokenizer=bytes", "a model has one tokenizer", "data.sources.a.tokenizer=bytes"),
    (f"{MIXED} data.sources.b.repo=x/y data.sources.b.train_files=[]", "data.sources.b.train_files=[]: names no file",
     "list files of the repository"),
    (f"{MIXED} +data.sources.b.path=x", "data.sources.b.path belongs to data@data.sources.b=tinyshakespeare",
     "choose data@data.sources.b=tinyshakespeare"),
    (f"{MIXED} data.sources.b.kind=files", "this is chosen with the whole source", "+data@data.sources.b=text_files"),
    (f"{MIXED} +data@data.sources.c=fineweb", "data.sources.a and data.sources.c are the same text", "leave c out"),
    (f"{MIXED} +data@data.sources.c=text_files", "data.sources.c.train_files is empty",
     "data.sources.c.train_files='[/corpus/"),
    (f"{MIXED} +data@data.sources.c=text_files data.sources.c.train_files=[no.txt]",
     "data.sources.c.train_files: no.txt does not exist", "correct the path"),
    (f"{MIXED} data.sources.b.cache_dir=/proc/x", "data.sources.b.cache_dir=/proc/x", "data.sources.b.cache_dir=F"),
    (f"{MIXED} +data@data.sources.c=registered data.sources.c.source=x", "data.sources.c.source=x: is registered by no",
     "plugins=[MODULE]"),
    (f"{MIXED} trainer.max_epochs=2", "each source of a mixture has passes of its own", "trainer.max_tokens=NUMBER"),
    (f"{MIXED} data.tokenizer=bytes", "data.tokenizer: each of data.sources has its own",
     "data.sources.a.tokenizer=bytes data.sources.b.tokenizer=bytes"),
    (f"{MIXED} data.val_sequences=0", "each of data.sources has", "data.sources.a.val_sequences=0 data.sources.b"),
    ("+data@data.sources.web=fineweb", "data.sources belongs to data=mixture", "choose data=mixture"),
    ("data=text_files data.train_files=[/]", "/ is a folder", "*.txt"),
    ("ckpt_path=nope", "ckpt_path=nope: does not exist", "outputs/RUN/checkpoints"),
    ("init_from=gpt2", "init_from=gpt2: does not exist", "nothing is downloaded"),
    ("init_from=nope", "init_from=nope: does not exist", "outputs/RUN/checkpoints"),
    ("init_from=best", "init_from=best: does not exist", "outputs/RUN/checkpoints"),
    ("ckpt_path=", "ckpt_path is empty", "ckpt_path=null"),
    ("ckpt_path=last", "of which run?", "run_name=NAME"),
    ("ckpt_path=last run_name=x init_from=/", "one continues a run", "give one of them"),
    ("run_name=../x", "leads out of outputs/", "hydra.run.dir=FOLDER"),
    ("run_name=/etc/x", "leads out of outputs/", "plain name"),
    ("run_name=", "is empty", "run_name=my_first_run"),
    ("'run_name=\"a\tb\"'", "control characters", "plain name"),
    (f"run_name={'x' * 300}", "too long", "plain name"),
    ("data.cache_dir=/dev/null/x", "/dev/null is a file", "data.cache_dir=FOLDER"),
    ("hydra.run.dir=/dev/null", "/dev/null is a file", "hydra.run.dir=FOLDER"),
]  # fmt: skip


TWO_MISTAKES = ["trainer.num_nodes=3", "ckpt_path=last run_name=x init_from=/", "model.n_embd=100 model.n_head=3"]


@pytest.mark.parametrize(("line", "cause", "remedy"), TABLE, ids=[line for line, _, _ in TABLE])
def test_refused(line, cause, remedy):
    """One mistake is one problem of two lines, whatever was typed; its remedy can be pasted into a shell."""
    problems = refusals(line)
    (told,) = [problem for problem in problems if cause in problem.cause]
    assert remedy in told.remedy
    assert problems == [told] or line in TWO_MISTAKES
    assert str(told).count("\n") == 1
    assert told.cause.isprintable()
    assert told.remedy.isprintable()
    plain = [re.sub(r"<\|\w+\|>", "", problem.remedy) for problem in problems]
    assert not any(re.search(r"=\S*\|", remedy) for remedy in plain), "a shell takes a bar for a pipe"


# Lines with a remedy that is a word to type.
TYPED = [
    *[
        "+tags.b.c=x",
        "+tags.b=[1,2]",
        "+tags.b=null",
        "+tags.b=inf",
        "+tags={b:{c:1}}",
        "tags=3",
        "+tags=3",
        "tags.b=1",
    ],
    *[
        "+tags.a=1 +tags.a.b=2",
        "+seed=3",
        "+seed=x",
        "+optim.lr=x",
        "seed={a:1}",
        "seed=[1]",
        "seed=null",
        "model.bias=1",
    ],
    *[
        "data.kind=hub",
        "data.kind=file_or_hub",
        "precision.name=bf16",
        "precision.keep_bf16=3",
        "precision.keep_bf16=head",
    ],
    *["optim.lr=inf", "compile=maybe", "compile=1", "notes=[1]", "run_name={a:1}", "model.n_layer=2.0", "seed.x=1"],
    *["precision=bf6", "recipe=delayd", "trainer.deterministic=yes"],
    *["activation_checkpointing=selective", "activation_checkpointing=true", "precision.backend=transformer_engine"],
    *["model.gqa=4", "model.gqa=true", "model.rope=true", "model.swiglu=true", "model.rmsnorm=true"],
    *["penalty=l2", "penalty=logit_l2", "penalty=activation_l1", "penalty=zloss"],
    *["fp8_recipe=tensorwise", "fp8_recipe=blockwise", "model.positions=alibi", "attention=xyz", "model.bias=maybe"],
    *["precision.fallback=x", "optim.schedule=xyz"],
]
EXAMPLES = {"NUMBER": "3", "TEXT": "x", "KEY": "key", "VALUE": "3"}


@pytest.mark.parametrize("line", TYPED)
def test_a_remedy_that_is_typed_is_taken(line):
    remedy = refusals(line)[0].remedy.replace("'", "")
    word = re.match(r"(?:did you mean )?(\+*[\w.]+=(?:\[[^]]*\]|[^][,? ]+))", remedy)[1]
    for name, example in EXAMPLES.items():
        word = word.replace(name, example)
    assert preflight([word])


def ways(remedy):
    """The words of each way out that a remedy names: `a=1 b=2, or c=3 (with this)` has two."""
    found = [re.findall(r"(?<![\w.=])[a-z][\w.]*=[\w.]+", way) for way in re.sub(r"\(.*?\)", "", remedy).split(", or ")]
    return [words for words in found if words]


OF_BACKENDS = re.compile(r"precision\.(backend|backward|fast_accumulation)=")
ABOUT_BACKENDS = [line for line, cause, _ in TABLE if OF_BACKENDS.search(line) and "belongs" not in cause]


@pytest.mark.parametrize("line", ABOUT_BACKENDS)
def test_every_way_out_of_a_backends_refusal_is_taken(line):
    problems = refusals(line)
    for problem in problems:
        for words in ways(problem.remedy):
            try:
                preflight([*shlex.split(line), *words])
            except UserError as error:
                left = [p.cause for p in error.problems]
                assert problem.cause not in left, words
                assert set(left) <= {p.cause for p in problems}, (words, left)


BACKEND_CHOICES = {
    "precision.backend": ("auto", "fused", "te", "torchao", "reference", "emulated"),
    "recipe": ("auto", "delayed", "current", "rowwise", "block", "mxfp8"),
    "precision.backward": ("fp8", "bf16", "bf16_wgrad"),
    "attention": ("auto", "te"),
    "cuda_graphs": ("auto", "true"),
    "model": ("tiny", "llama"),
}
MODELS = {"tiny": {}, "llama": {"n_kv_head": 2, "norm": "rms_norm", "mlp": "swiglu", "positions": "rope"}}


def test_every_way_out_of_every_combination_is_taken():
    """All of the product: each remedy of a backend's refusal names ways, and each leaves no problem that is new."""
    bases = {name: preflight([f"recipe={name}"])[0] for name in BACKEND_CHOICES["recipe"]}

    @cache
    def found_in(words):
        return list(backend_check.check(with_words(bases, dict(words))))

    refused = dict.fromkeys(MODELS, 0)
    for values in itertools.product(*BACKEND_CHOICES.values()):
        chosen = dict(zip(BACKEND_CHOICES, values, strict=True))
        found = found_in(tuple(chosen.items()))
        for one in found:
            of_backend = is_about_a_backend(one.problem.cause)
            refused[chosen["model"]] += of_backend
            assert ways(one.problem.remedy) or not of_backend, chosen
            for words in ways(one.problem.remedy):
                changed = chosen | dict(word.split("=", 1) for word in words)
                left = found_in(tuple(changed.items()))
                causes = [other.problem.cause for other in left]
                assert not of_backend or not any(map(is_about_a_backend, causes)), (chosen, words)
                assert one.problem.cause not in causes, (chosen, words)
                assert {other.keys[0] for other in left} <= {other.keys[0] for other in found}, (chosen, words, causes)
    assert min(refused.values()) > 200


def is_about_a_backend(cause):
    return "cannot run" in cause or "no backend" in cause


def with_words(bases, chosen):
    """The configuration of such words, without composing it."""
    config = bases[chosen["recipe"]]
    precision = replace(config.precision, backend=chosen["precision.backend"], backward=chosen["precision.backward"])
    if "precision" in chosen:
        assert precision == replace(config.precision, backend=precision.backend), "a key of FP8's alone would be left"
        precision = PlainPrecisionConfig(name=chosen["precision"], backend=precision.backend)
    graphs = {"auto": "auto", "true": True}[chosen["cuda_graphs"]]
    model = replace(config.model, **MODELS[chosen["model"]])
    return replace(config, precision=precision, attention=chosen["attention"], cuda_graphs=graphs, model=model)


def test_what_other_programs_say_for_a_value_is_a_value_here():
    for key, words in other_words._VALUES.items():
        for word, ours in words.items():
            (found,) = [problem for problem in refusals(f"{key}={word}") if problem.cause.startswith(f"{key}=")]
            assert found.remedy == f"{key}={ours}"


@pytest.mark.parametrize("words", ["data.val_sequences=8", "data.tokenizer=bytes data.sources.a.tokenizer=gpt2"])
def test_what_is_advised_for_each_source_is_taken(words):
    line = f"{MIXED} {words}"
    advised = next(p.remedy for p in refusals(line) if "each of" in p.cause)
    kept = [word for word in shlex.split(line) if not word.startswith(("data.val", "data.tok"))]
    assert preflight([*kept, *advised.split()])


@pytest.mark.parametrize("key", RANGES)
def test_every_range_refuses(key):
    tags = key_paths(RunConfig)[key]
    group = key.partition(".")[0]
    choice = f"{group}={hints.KINDS.get(tags[0], tags)[0]} " if tags else ""
    (problem,) = [p for p in refusals(f"{choice}{key}=-1") if key in p.cause]
    assert f"{key}=-1" in problem.cause


@pytest.mark.parametrize("schema", [RunConfig, BenchConfig])
def test_every_number_has_a_range(schema):
    found = list(ranges(schema))
    assert len(found) > 4
    assert [key for key, range_ in found if range_ is None] == []


def test_a_key_of_several_classes_has_one_range():
    found = list(ranges(RunConfig))
    assert len(found) > len(RANGES) > 35
    assert all(range_ == RANGES[key] for key, range_ in found)


def test_all_problems_at_once():
    causes = "\n".join(
        p.cause
        for p in refusals(
            "model=gpt3 data=nope lr=1 seed=-1 optim.eps=x --foo hydra.callbacks.a=1 trainer.max_steps=5,6 "
            "recipe=delayed recipe.margin=-2 run_name=../x"
        )
    )
    for word in ("model=gpt3", "data=nope", "no key lr", "seed=-1", "optim.eps=x", "--foo", "hydra.callbacks.a"):
        assert word in causes
    for word in ("trainer.max_steps=5,6", "recipe.margin=-2", "run_name=../x"):
        assert word in causes


@pytest.mark.parametrize(
    "line",
    [
        "data=tinyshakespear data.path=x",
        "model=gpt3 model.n_embd=2048",
        "experiment=nope data.repo=x trainer.max_steps=3",
        "recipe=delayd recipe.margin=1",
        "data=finewb data.tokenizer=gpt2 model.vocab_size=50257",
    ],
)
def test_what_follows_from_a_wrong_choice_is_not_said(line):
    (problem,) = refusals(line)
    assert "no such choice" in problem.cause


ALL_OPTIONS_WRONG = (
    "model=llama3_2_1b model.n_kv_head=5 model.head_size=33 model.mlp_width=100 model.rope_high_freq_factor=0.5 "
    "model.rope_original_positions=null precision.backend=fused"
)


def test_every_problem_of_a_models_options_is_told_at_once():
    causes = "\n".join(p.cause for p in refusals(ALL_OPTIONS_WRONG))
    for word in (
        "n_kv_head=5: each",
        "a head has 33",
        "mlp_width=100: FP8",
        "also needs model.rope_original",
        "the low f",
    ):
        assert word in causes
    told = [p for p in refusals(ALL_OPTIONS_WRONG) if "model." in p.cause]
    fixed = " ".join(word for p in told for word in p.remedy.split(", or ")[0].split() if word.startswith("model."))
    assert "model.n_kv_head=4" in fixed
    preflight(shlex.split(f"{ALL_OPTIONS_WRONG} {fixed} precision.backend=te"))  # what is proposed works


def test_options_that_fit_are_accepted():
    for line in (
        "model.head_size=48 model.n_embd=80 model.n_head=3 model.n_kv_head=1",  # such heads need not share n_embd
        "model.positions=rope model.rope_scaling=8",
        "model.positions=rope model.head_size=7 model.n_embd=100 precision=bf16 model.head_size=10",
        "model.n_head=6 model.n_kv_head=3 model.n_embd=96",
        "model=llama3_8b model.tied_head=true precision.backend=te recipe=current",
    ):
        preflight(shlex.split(line))


def test_a_key_that_follows_another_is_not_blamed():
    assert [p.cause for p in refusals("seed=-1")] == ["seed=-1: must be from 0 to 4294967295"]
    assert [p.cause for p in refusals("seed=-1 data.seed=-2")][1:] == ["data.seed=-2: must be from 0 to 4294967295"]


def test_a_bad_value_is_not_compared():
    assert [p.cause for p in refusals("micro_batch_size=x global_batch_size=12")] == [
        "micro_batch_size=x: must be a whole number or auto"
    ]


@pytest.mark.parametrize("line", ["precision=fp32", "precision=bf16"])
def test_fp8_multiples_bind_fp8_alone(line):
    (config,) = preflight([line, "model.n_embd=100", "model.n_positions=50", "micro_batch_size=1"])
    assert config.model.n_embd == 100


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "rowwise"])
def test_blocks_of_a_recipe_need_not_be_full(recipe):
    """Widths of 144 and heads of 48 divide by 16, not by the 128 values of a block: Transformer Engine pads these."""
    assert preflight([f"recipe={recipe}", "model.n_embd=144", "model.n_head=3", "model.n_positions=240"])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_recipe_binds_fp8_alone(precision):
    assert preflight(["recipe=mxfp8", f"precision={precision}", "model.n_embd=100", "model.n_positions=50"])


def test_batch_once_the_world_is_known():
    (config,) = preflight(["trainer=ddp"])
    check_batch(config, 1)
    with pytest.raises(UserError, match="16 on each of 4 devices") as caught:
        check_batch(config, 4)
    assert "micro_batch_size=4" in caught.value.problems[0].remedy
    check_batch(replace(config, micro_batch_size=4), 4)


def test_the_defaults_have_nothing_wrong():
    (config,) = preflight([])
    assert check(config) == []
    assert value_of(config, "data.val_fraction") is None


def test_two_sources_of_the_same_files_are_refused_by_any_spelling(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("good.txt", "other.txt"):
        (tmp_path / "d" / name).write_text("text")
    (tmp_path / "ln.txt").symlink_to(tmp_path / "d" / "good.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "d")
    mixed = "data=mixture +data@data.sources.a=text_files +data@data.sources.b=text_files"
    first = f"{mixed} data.sources.a.train_files=[d/good.txt]"
    for word in (f"{tmp_path}/d/good.txt", "d/../d/good.txt", "ln.txt", "linked/go*.txt", "d/good.txt,ln.txt"):
        (problem,) = refusals(f"{first} data.sources.b.train_files=[{word}]")
        assert problem.cause == "data.sources.a and data.sources.b are the same text"
    assert preflight(f"{first} data.sources.b.train_files=[d/other.txt]".split())
    tiny = "data=mixture +data@data.sources.a=tinyshakespeare +data@data.sources.b=tinyshakespeare"
    (problem,) = refusals(f"{tiny} data.sources.a.path=ln.txt data.sources.b.path=d/good.txt")
    assert problem.cause == "data.sources.a and data.sources.b are the same text"


def test_files_that_are_there_are_accepted(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("text")
    for pattern in ("a.txt", "*.txt", "**/b.txt", str(tmp_path / "a.txt")):
        preflight(["data=text_files", f"data.train_files=['{pattern}']"])
    (tmp_path / "ckpt").mkdir()
    preflight(["ckpt_path=ckpt"])
    assert "is a file" in refusals("init_from=a.txt")[0].cause


def test_hints_are_about_names_that_are_not_keys():
    paths = key_paths(RunConfig)
    leaves = {path.rpartition(".")[2] for path in paths}
    assert not set(foreign_keys.KEYS) & (set(paths) | leaves)


def test_hints_name_keys_that_exist():
    known = set(key_paths(RunConfig)) | {"hydra.run.dir"}
    for name, (_, remedy) in foreign_keys.KEYS.items():
        for word in remedy.replace(",", " ").replace("=", " ").split():
            group, dot, _ = word.partition(".")
            if dot and group in {f.name for f in fields(RunConfig)}:
                assert word in known, name
