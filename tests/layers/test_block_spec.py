"""A block's description: what fits, and which options it has."""

from dataclasses import replace

import pytest

from gpt2_fp8.config.block_spec import MLP, Bands, Heads, Norm, RoPE, block_spec
from tests.common import CONFIG

SPEC = block_spec(replace(CONFIG, n_embd=256, n_head=4))


def test_gpt2s_block():
    assert (SPEC.norm, SPEC.heads) == (Norm("layer_norm", 1e-5), Heads(n_head=4, n_kv_head=4, size=64))
    assert SPEC.mlp == MLP("gelu", 1024)
    assert (SPEC.positions, SPEC.tied, SPEC.bias, SPEC.dropout) == ("learned", True, True, 0.0)


def test_every_key_reaches_the_description():
    config = replace(
        CONFIG, n_kv_head=2, head_size=6, qk_norm=True, norm="rms_norm", norm_epsilon=1e-6, mlp="swiglu", mlp_width=48,
        positions="rope", rope_base=5e5, rope_scaling=32.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
        rope_original_positions=8192, tied_head=False, bias=False, dropout=0.1,
    )  # fmt: skip
    spec = block_spec(config)
    assert (spec.norm, spec.heads) == (Norm("rms_norm", 1e-6), Heads(n_head=4, n_kv_head=2, size=6, qk_norm=True))
    assert (spec.mlp, spec.mlp.projected) == (MLP("swiglu", 48), 96)
    assert spec.positions == RoPE(5e5, 32.0, Bands(1.0, 4.0, 8192))
    assert (spec.tied, spec.bias, spec.dropout) == (False, False, 0.1)
    widths = spec.n_embd, spec.heads.queries, spec.heads.packed, spec.mlp.width, spec.mlp.projected
    assert widths == (32, 24, 48, 48, 96)
    assert block_spec(replace(CONFIG, positions="rope")).positions == RoPE(10000.0)


WRONG = {
    "4 heads do not share 3 key-value heads": {"heads": Heads(4, 3, 64)},
    "every width and number of heads is at least 1": {"heads": Heads(4, 0, 64)},
    "RoPE turns pairs of channels, and a head has 7": {"heads": Heads(4, 4, 7), "positions": RoPE(1e4)},
    "RoPE's base and scaling are above 0": {"positions": RoPE(1e4, scaling=0.0)},
    "RoPE's low frequency factor is above 0 and below the high one": {
        "positions": RoPE(1e4, 2.0, Bands(low=4.0, high=4.0, original_positions=64))
    },
    "a normalisation's epsilon is above 0": {"norm": Norm("rms_norm", 0.0)},
    "dropout is at least 0 and below 1": {"dropout": 1.0},
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_does_not_fit_is_refused(reason):
    with pytest.raises(ValueError, match=f"^{reason}$"):
        replace(SPEC, **WRONG[reason])


@pytest.mark.parametrize("n_head", [0, 3])
def test_gpt2s_heads_share_its_width(n_head):
    with pytest.raises(ValueError, match=f"{n_head} heads do not share 32 channels in equal parts"):
        block_spec(replace(CONFIG, n_head=n_head))
