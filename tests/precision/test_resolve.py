"""What runs where, with torch's and Transformer Engine's answers replaced."""

from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import FP8PrecisionConfig, PlainPrecisionConfig, StatelessRecipe
from gpt2_fp8.precision import resolve as resolving
from gpt2_fp8.precision import support
from gpt2_fp8.precision.resolve import resolve


def config(precision="fp8_hybrid", fallback="allow", recipe="current", accelerator="auto", compile="auto"):
    plain = precision in ("fp32", "bf16")
    chosen = (
        PlainPrecisionConfig(name=precision)
        if plain
        else FP8PrecisionConfig(name=precision, keep_bf16=[], layers="auto", fallback=fallback)
    )
    return SimpleNamespace(
        precision=chosen,
        recipe=StatelessRecipe(name=recipe),
        trainer=SimpleNamespace(accelerator=accelerator),
        compile=compile,
    )


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(resolving, "why_not_fp8", lambda: None)
    monkeypatch.setattr(
        resolving, "why_not_recipe", lambda name: "it needs compute capability 10.0" if name == "mxfp8" else None
    )


def test_fp8_where_it_can_run(hopper):
    plan = resolve(config(), "cuda")
    assert (plan.ran, plan.reason, plan.backend, plan.compile, plan.fp8) == ("fp8_hybrid", None, "te", False, True)


def test_recipe_the_gpu_cannot_do_is_refused(hopper):
    with pytest.raises(UserError, match=r"recipe=mxfp8.*10\.0"):
        resolve(config(recipe="mxfp8"), "cuda")


def test_gpu_without_fp8_falls_back_to_compiled_bf16(monkeypatch):
    monkeypatch.setattr(resolving, "why_not_fp8", lambda: "the card is too old")
    plan = resolve(config(), "cuda")
    assert (plan.ran, plan.reason, plan.backend, plan.compile) == ("bf16", "the card is too old", "reference", True)


def test_cpu_falls_back_to_fp32_and_says_why():
    plan = resolve(config(accelerator="cpu"), "cpu")
    assert (plan.ran, plan.backend, plan.compile) == ("fp32", "reference", False)
    assert "CPU" in plan.reason


def test_fallback_error_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"cannot run here(.|\n)*precision.fallback=allow"):
        resolve(config(fallback="error", accelerator="cpu"), "cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plain_precisions_run_as_asked(precision):
    plan = resolve(config(precision), "cpu")
    assert (plan.ran, plan.reason) == (precision, None)
    assert resolve(replace_compile(precision, True), "cpu").compile


def replace_compile(precision, compile):
    return config(precision, compile=compile)


def test_reasons_of_a_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert "A100 has compute capability 8.0" in support.why_not_fp8()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in support.why_not_fp8()


@pytest.mark.parametrize("error", [OSError("libcudnn.so.9: cannot open"), ImportError("undefined symbol: _ZN\nmore")])
def test_a_broken_transformer_engine_is_a_reason(monkeypatch, error, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"raise {error!r}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    reason = support.why_not_fp8()
    assert reason.startswith(f"Transformer Engine does not load: {type(error).__name__}")
    assert "\n" not in reason


def test_long_reasons_are_cut():
    assert len(support.first_line("x" * 999)) == 200
