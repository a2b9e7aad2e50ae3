"""What models and experiments are: published shapes, and the settings of the five attempts of docs/seeds.md.

Every number is written here a second time, from its source, so that a changed file of conf/ does not pass.
"""

import pytest

from gpt2_fp8.compose import conf_dir, preflight
from gpt2_fp8.config.keys import value_of
from tests.config.conf_files import merged

# Radford et al. 2019, table 2; layers, heads, channels, positions
GPT2 = {
    "tiny": (4, 4, 128, 256),  # this project's own
    "gpt2": (12, 12, 768, 1024),
    "gpt2_medium": (24, 16, 1024, 1024),
    "gpt2_large": (36, 20, 1280, 1024),
    "gpt2_xl": (48, 25, 1600, 1024),
    "gpt2_wide": (16, 32, 4096, 2048),  # this project's own, at Llama 3 8B's width
    "gpt2_optimized": (12, 12, 768, 2048),  # seed 003's OptimizedConfig
}
# Layers, heads, key-value heads, channels, hidden channels, positions, ids, base of the frequencies, tied.
LLAMA = {
    "llama3_small": (12, 16, 4, 2048, 5504, 2048, None, 5e5, False),  # seed 004's
    "llama3_2_1b": (16, 32, 8, 2048, 8192, 8192, 128256, 5e5, True),  # config.json of Llama-3.2-1B
    "llama3_8b": (32, 32, 8, 4096, 14336, 8192, 128256, 5e5, False),  # config.json of Meta-Llama-3-8B
    "qwen3_0_6b": (28, 16, 8, 1024, 3072, 4096, 151936, 1e6, True),  # config.json of Qwen3-0.6B, at 4,096 positions
}
MODERN = {  # GPT-2's sizes in heads of 128
    "gpt2_modern": (12, 6, 768, 1024),
    "gpt2_modern_medium": (24, 8, 1024, 1024),
    "gpt2_modern_large": (36, 10, 1280, 1024),
}
KEYS = ["n_layer", "n_head", "n_kv_head", "n_embd", "mlp_width", "n_positions", "vocab_size", "rope_base", "tied_head"]
GPT2_BLOCK = {
    "vocab_size": None, "dropout": 0.0, "bias": True, "n_kv_head": None, "head_size": None, "qk_norm": False,
    "norm": "layer_norm", "norm_epsilon": 1e-5, "mlp": "gelu", "mlp_width": None, "positions": "learned",
    "rope_base": None, "rope_scaling": None, "rope_low_freq_factor": None, "rope_high_freq_factor": None,
    "rope_original_positions": None, "tied_head": True, "depth_scaled_init": True,
}  # fmt: skip
LLAMA_BLOCK = {
    **GPT2_BLOCK, "bias": False, "norm": "rms_norm", "mlp": "swiglu", "positions": "rope", "depth_scaled_init": False,
}  # fmt: skip
MODERN_BLOCK = {  # RMSNorm, RoPE and QK-norm as Qwen3; the MLP of So et al. 2021
    **GPT2_BLOCK, "bias": False, "qk_norm": True, "norm": "rms_norm", "mlp": "relu_squared", "positions": "rope",
}  # fmt: skip
BESIDES = {
    "gpt2_optimized": {"n_kv_head": 4, "norm": "rms_norm"},
    "llama3_2_1b": {
        "rope_scaling": 32.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0,
        "rope_original_positions": 8192,
    },
    "qwen3_0_6b": {"head_size": 128, "qk_norm": True, "norm_epsilon": 1e-6},
}  # fmt: skip

SMALL_LLAMA = {"model.name": "llama3_small", "data.name": "slimpajama", "trainer.max_time": "00:01:56:00"}
TENSORWISE = {**SMALL_LLAMA, "precision.name": "fp8_hybrid", "recipe.name": "current", "precision.backward": "fp8"}
HALF_A_COSINE = {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.1}
EXPERIMENTS = {
    "fineweb_edu_fp8": {  # seed 001: rate 3e-3, 2,000 warm-up steps, 512 sequences, two epochs of 10 B tokens
        **HALF_A_COSINE, "model.name": "gpt2", "data.name": "fineweb", "precision.name": "fp8_hybrid", "optim.lr": 3e-3,
        "optim.warmup_steps": 2000, "global_batch_size": 512, "trainer.max_steps": 38000,
        "data.train_files": ["sample/10BT/*.parquet"],
    },
    "fineweb_edu_full_fp8": {  # seed 001: the same on 1.3 T tokens
        **HALF_A_COSINE, "model.name": "gpt2", "data.name": "fineweb", "precision.name": "fp8_hybrid", "optim.lr": 3e-3,
        "optim.warmup_steps": 2000, "global_batch_size": 512, "trainer.max_steps": 2_000_000,
        "data.train_files": ["data/*/*.parquet"],
    },
    "openwebtext_bf16": {  # seed 001's openwebtext_adaptive_batch: automatic batch, 512 in effect
        **HALF_A_COSINE, "model.name": "gpt2", "data.name": "openwebtext", "precision.name": "bf16", "optim.lr": 6e-4,
        "optim.warmup_steps": 2000, "global_batch_size": 512, "micro_batch_size": "auto", "trainer.max_steps": 17000,
    },
    "tinyshakespeare_fp8": {  # seed 001's test_fp8; its sizes are this project's own
        **HALF_A_COSINE, "model.name": "gpt2", "data.name": "tinyshakespeare", "precision.name": "fp8_hybrid",
        "model.dropout": 0.1, "optim.lr": 6e-4, "optim.warmup_steps": 20, "global_batch_size": 64,
        "micro_batch_size": 64, "trainer.max_steps": 200, "trainer.val_check_interval": 25,
    },
    # seed 004: five configurations, 1 h 56 min each
    "llama3_small_bf16": {**SMALL_LLAMA, "precision.name": "bf16"},
    "llama3_small_delayed": {
        **SMALL_LLAMA, "precision.name": "fp8_hybrid", "recipe.name": "delayed", "recipe.amax_history_len": 1024,
        "recipe.amax_compute_algo": "max", "recipe.margin": 0, "precision.keep_bf16": [],
    },
    "llama3_small_tensorwise": {**TENSORWISE, "precision.keep_bf16": []},
    "llama3_small_tensorwise_first_last": {**TENSORWISE, "precision.keep_bf16": ["first", "last"]},
    "gpt2_modern_muon": {  # this project's own
        **HALF_A_COSINE, "model.name": "gpt2_modern", "data.name": "fineweb", "precision.name": "fp8_hybrid",
        "optimizer.name": "muon", "optim.lr": 3e-3, "optim.embedding_lr": 6e-3, "optim.warmup_steps": 700,
        "global_batch_size": 512, "trainer.max_steps": 19073,
    },
    "speedrun_1gpu": {  # the same in small steps
        "model.name": "gpt2_modern", "data.name": "fineweb", "precision.name": "fp8_hybrid", "optimizer.name": "muon",
        "optimizer.matrix_lr": 2e-3, "optim.lr": 3e-3, "optim.embedding_lr": 6e-3, "optim.scalar_lr": 1e-2,
        "optim.beta1": 0.8, "optim.schedule": "warmup_stable_decay", "optim.min_lr_ratio": 0.1,
        "optim.warmup_steps": 150, "optim.decay_steps": 600, "global_batch_size": 32, "micro_batch_size": 32,
        "trainer.max_steps": 1560,
    },
    "llama3_small_blockwise": {**TENSORWISE, "recipe.name": "block", "precision.keep_bf16": []},
}  # fmt: skip


def files(group):
    return {path.stem for path in (conf_dir() / group).glob("*.yaml")}


def shape(name):
    """All keys of a model, from its source."""
    if name in GPT2 or name in MODERN:
        block, numbers = (GPT2_BLOCK, GPT2[name]) if name in GPT2 else (MODERN_BLOCK, MODERN[name])
        sizes = dict(zip(("n_layer", "n_head", "n_embd", "n_positions"), numbers, strict=True))
        return {**block, **sizes, **BESIDES.get(name, {}), "name": name}
    return {**LLAMA_BLOCK, **dict(zip(KEYS, LLAMA[name], strict=True)), **BESIDES.get(name, {}), "name": name}


def test_every_file_has_its_row():
    assert files("model") == GPT2.keys() | LLAMA.keys() | MODERN.keys()
    assert files("experiment") == EXPERIMENTS.keys()


@pytest.mark.parametrize("name", [*GPT2, *LLAMA, *MODERN])
def test_a_model_is_the_one_that_was_published(name):
    """By every key: a value of the file that is left out or changed shows."""
    path = (conf_dir() / "model" / f"{name}.yaml").relative_to(conf_dir())
    assert merged(path) == shape(name)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_its_seeds_settings(name):
    (config,) = preflight([f"experiment={name}"])
    assert {key: value_of(config, key) for key in EXPERIMENTS[name]} == EXPERIMENTS[name]
