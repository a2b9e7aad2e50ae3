"""Which attention the fused layers take, with stand-ins for FlashAttention 4 (tests/gpu runs the real one)."""

import sys
from types import ModuleType

import pytest
import torch

from gpt2_fp8.config.block_spec import gpt2_heads
from gpt2_fp8.layers import attention, reference
from gpt2_fp8.layers.attention import FlashAttention, flash_backward, has_torchs, kernels, why_no_flash, why_not_flash

OF_64 = gpt2_heads(n_head=12, n_embd=768)


def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, deterministic=False, dq=None, dk=None, dv=None):
    """The interface that is called."""


@pytest.fixture(autouse=True)
def _ask_again():
    _forget()
    yield
    _forget()


def _forget():
    flash_backward.cache_clear()
    why_no_flash.cache_clear()


@pytest.fixture
def install(monkeypatch):
    """Install a package flash_attn with this backward; None: without the part that is FlashAttention 4."""

    def put(function):
        names = ["flash_attn", "flash_attn.cute", "flash_attn.cute.interface"]
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if function or name == names[0] else None)
        if function:
            sys.modules[names[-1]]._flash_attn_bwd = function

    return put


def test_it_is_taken_where_it_is_installed(install):
    install(backward)
    assert flash_backward() is backward
    assert "FlashAttention 4 backward" in kernels(OF_64)
    assert isinstance(attention.attention(OF_64), FlashAttention)
    assert isinstance(attention.attention(gpt2_heads(6, 768)), FlashAttention), "heads of 128"
    assert why_not_flash(OF_64) is None


def test_flash_attention_2_is_left_alone(install, monkeypatch):
    install(None)
    assert flash_backward() is None
    assert why_not_flash(OF_64) == "flash-attn-4 is not installed"
    assert kernels(OF_64) == "cuDNN"
    monkeypatch.setattr(attention, "TEAttention", lambda heads, dropout, epsilon: ("te", heads, dropout))
    assert attention.attention(OF_64) == ("te", OF_64, 0.0)


@pytest.mark.parametrize("function", [backward, None], ids=["installed", "not installed"])
def test_a_kernel_that_is_asked_for_is_taken_whatever_is_installed(install, function, monkeypatch):
    install(function)
    monkeypatch.setattr(attention, "TEAttention", lambda heads, dropout, epsilon: ("te", heads, dropout))
    assert attention.attention(OF_64, "te") == ("te", OF_64, 0.0)
    assert isinstance(attention.attention(OF_64, "flash"), FlashAttention)
    for kernel in ("sdpa", "cudnn"):
        made = attention.attention(OF_64, kernel)
        assert (type(made), made.choice, made.dropout) == (attention.Attention, kernel, 0.0)


@pytest.mark.parametrize("tokens", [128, 129])
@pytest.mark.parametrize("function", [backward, None], ids=["installed", "not installed"])
def test_short_sequences_go_to_torch_only_where_others_go_to_flash_attention(install, function, tokens, monkeypatch):
    """What `has_torchs` says is what the module does: Transformer Engine's takes sequences of any length."""
    went = []
    install(function)
    monkeypatch.setattr(attention, "TEAttention", lambda *_: lambda qkv: went.append("te"))
    monkeypatch.setattr(reference, "causal_attention", lambda *_: went.append("torch"))
    monkeypatch.setattr(attention._FlashAttention, "apply", lambda *_: went.append("flash"))
    attention.attention(OF_64)(torch.empty(1, tokens, OF_64.packed))
    assert (went == ["torch"]) == has_torchs(OF_64, tokens) == (function is not None and tokens == 128)
    assert (
        went == ["torch"]
        or kernels(OF_64) == {"te": "cuDNN", "flash": "cuDNN forward, FlashAttention 4 backward"}[went[0]]
    )


@pytest.mark.parametrize("error", [OSError("libcute.so: cannot open"), RuntimeError("no compiler")])
def test_one_that_does_not_load_is_left_alone(error, tmp_path, monkeypatch):
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(f"raise {error!r}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    assert flash_backward() is None
    assert why_not_flash(OF_64) == f"flash-attn-4 does not load: {type(error).__name__}: {error}"
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize(
    ("n_head", "n_embd", "said"),
    [
        (4, 128, "cuDNN"),
        (4, 384, "cuDNN"),
        (2, 512, "cuDNN"),
        (1, 264, "Transformer Engine's choice, not cuDNN"),
        (12, 1008, "Transformer Engine's choice, not cuDNN"),
        (768, 768, "Transformer Engine's choice, not cuDNN"),
    ],
)
def test_other_heads_are_transformer_engines(install, n_head, n_embd, said):
    """On Hopper it takes cuDNN, which has kernels for multiples of 8 up to 256."""
    install(backward)
    heads = gpt2_heads(n_head, n_embd)
    assert kernels(heads) == said
    assert not has_torchs(heads, 16)
    assert why_not_flash(heads) == f"heads of {n_embd // n_head}"
