"""Each option of a model by itself, and all of them together, at a size for a test."""

from dataclasses import replace

from tests.common import CONFIG

LLAMA = {"bias": False, "norm": "rms_norm", "mlp": "swiglu", "mlp_width": 48, "positions": "rope"}
MODERN = {
    "bias": False, "qk_norm": True, "norm": "rms_norm", "mlp": "relu_squared", "positions": "rope", "tied_head": False,
    "depth_scaled_init": False,
}  # fmt: skip
BANDS = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_positions": 64}
OPTIONS = {
    "grouped-query attention": {"n_kv_head": 2},
    "one key-value head": {"n_kv_head": 1},
    "RMSNorm": {"norm": "rms_norm"},
    "its epsilon": {"norm": "rms_norm", "norm_epsilon": 0.1},
    "LayerNorm's epsilon": {"norm_epsilon": 0.1},
    "RoPE": {"positions": "rope"},
    "RoPE's base": {"positions": "rope", "rope_base": 100.0},
    "scaled RoPE": {"positions": "rope", "rope_base": 100.0, "rope_scaling": 8.0},
    "Llama 3's scaling": {"positions": "rope", "rope_base": 100.0, "rope_scaling": 8.0, **BANDS},
    "QK-norm": {"qk_norm": True},
    "SwiGLU": {"mlp": "swiglu"},
    "squared ReLU": {"mlp": "relu_squared"},
    "an MLP's own width": {"mlp_width": 80},
    "no bias": {"bias": False},
    "an untied head": {"tied_head": False},
    "larger heads": {"head_size": 16},
    "smaller heads": {"head_size": 4},
    "a block of 2026": MODERN,
    "all together": {
        **LLAMA, **BANDS, "n_kv_head": 2, "head_size": 16, "qk_norm": True, "norm_epsilon": 1e-6, "rope_base": 100.0,
        "rope_scaling": 8.0, "tied_head": False, "depth_scaled_init": False,
    },
}  # fmt: skip


def configured(name, **changes):
    return replace(CONFIG, **{**OPTIONS[name], **changes})
