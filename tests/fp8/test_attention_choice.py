"""Which kernel of attention each backend takes and which it refuses, with the GPU's answers replaced."""

from dataclasses import replace

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.config import backend_support
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.fp8 import backends, resolve
from gpt2_fp8.fp8.resolve import BACKENDS, check_attention, fallen_back, plain_plan
from gpt2_fp8.layers import attention, sdpa

WORDS = {
    "reference": ["precision=bf16"], "te": ["precision.backend=te"], "fused": [],
    "emulated": ["precision.backend=emulated"], "torchao": ["precision.backend=torchao"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def can(monkeypatch):
    """The kernels that this pretended GPU has; a test may remove some."""
    able = {"cudnn", "flash", "flash 4", "te"}

    def why_not(kernel, heads, tokens, dropout):
        assert (heads.size, tokens) == (64, 1024)
        return None if kernel in able else f"no {kernel}"

    monkeypatch.setattr(sdpa, "why_not", why_not)
    monkeypatch.setattr(backends, "has_fp8_conversion", lambda: True)
    monkeypatch.setattr(attention, "why_no_flash", lambda: None if "flash 4" in able else "no FlashAttention 4")
    monkeypatch.setattr(backends, "why_no_transformer_engine", lambda: None if "te" in able else "no TE")
    return able


def made(name, kernel, device="cuda", *words):
    (config,) = compose.preflight(["model=gpt2", "trainer=gpu", *WORDS[name], *words])
    return BACKENDS[name](replace(config, attention=kernel), "bf16" if name == "reference" else "fp8_hybrid", device)


TAKEN = {"te": "sdpa cudnn flash te"} | dict.fromkeys(("reference", "torchao", "emulated"), "sdpa cudnn flash")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kernel", ["auto", "sdpa", "cudnn", "flash", "te"])
def test_each_backend_takes_its_kernels(name, kernel):
    taken = ["auto", *TAKEN.get(name, "sdpa cudnn flash te").split()]
    backend = made(name, kernel)
    if kernel in taken:
        check_attention(backend)
        return
    with pytest.raises(UserError) as refused:
        check_attention(backend)
    (problem,) = refused.value.problems
    assert problem.cause == f"attention={kernel} cannot run here: these layers have only torch's kernels"


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "te"])
def test_a_cpu_has_torchs_choice_alone(kernel):
    with pytest.raises(UserError) as refused:
        check_attention(made("reference", kernel, "cpu"))
    (problem,) = refused.value.problems
    assert "its kernels are a GPU's" in problem.cause
    check_attention(made("reference", "sdpa", "cpu"))


def test_the_fused_layers_flash_is_flash_attention_4(can):
    can.remove("flash")
    check_attention(made("fused", "flash"))
    can.remove("flash 4")
    assert made("fused", "flash").why_not_attention("flash") == "no FlashAttention 4"


def test_a_run_that_falls_back_to_bf16_leaves_a_kernel_that_its_layers_lack(monkeypatch, can):
    for kernel, taken in (("te", "auto"), ("cudnn", "cudnn")):
        backend = made("te", kernel)
        plan = resolve.Plan("cuda", "fp8_hybrid", "fp8_hybrid", None, backend)
        assert fallen_back(plan, backend.config, "it diverged").backend.config.attention == taken


def test_a_model_that_no_trainer_computes_has_torchs_choice():
    assert plain_plan(made("te", "te").config, "cpu").backend.config.attention == "auto"


def test_a_plan_with_a_kernel_that_cannot_run_is_refused(can):
    can.remove("cudnn")
    backend = made("reference", "cudnn")
    with pytest.raises(UserError, match="attention=cudnn cannot run here: no cudnn"):
        resolve.resolve(backend.config, "cuda")


def test_a_document_mask_takes_transformer_engines_layers_with_torchs_attention():
    (config,) = compose.preflight(["model=gpt2", "trainer=gpu", "document_mask=true"])
    assert backend_support.why_not_fused(config) == "their attention has no mask, and this is document_mask=true"
    made_te = BACKENDS["te"](config, "fp8_hybrid", "cuda")
    assert (made_te.kernel, made_te.family().kernel) == ("sdpa", "sdpa")


def test_kernels_are_named(monkeypatch):
    monkeypatch.setattr(
        sdpa, "kernels", lambda kernel, heads, tokens, dropout, dtype, device, masked: f"torch's {kernel}"
    )
    assert made("reference", "cudnn").kernels(50257)["attention"] == "torch's cudnn"
    assert made("te", "flash").kernels(50257)["attention"] == "torch's flash"
    assert made("te", "te").kernels(50257)["attention"] == "Transformer Engine's choice"
    assert made("emulated", "sdpa").kernels(50257)["attention"] == "torch's sdpa"
