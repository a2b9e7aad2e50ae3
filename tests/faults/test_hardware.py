"""Faults 71 and 72: a Transformer Engine that does not load; no GPU, or a torch without CUDA."""

import sys
from dataclasses import replace

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.fp8.resolve import resolve

BROKEN = {
    "OSError('libcublas.so.13: cannot open shared object file: No such file or directory')": "libcublas.so.13",
    "RuntimeError('TransformerEngine was built for\\n CUDA 12,\\n and this is 13')": "built for CUDA 12, and",
}


@pytest.mark.parametrize("error", BROKEN)
def test_71_a_transformer_engine_that_does_not_load(tmp_path, monkeypatch, error):
    """bf16 with the reason on one line, on a GPU that could do FP8; and 2 where that was not wanted."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr("gpt2_fp8.compat.torchao.why_not", lambda: "torchao is not installed")
    (config,) = compose.preflight(["model=gpt2"])
    plan = resolve(config, "cuda")
    assert (plan.asked, plan.ran, plan.backend.name) == ("fp8_hybrid", "bf16", "reference")
    told = f"Transformer Engine does not load: {error.partition('(')[0]}", BROKEN[error]
    assert all(word in plan.reason for word in told)
    assert plan.reason.isprintable()
    assert len(plan.reason) < 300
    with pytest.raises(UserError) as refused:
        resolve(replace(config, precision=replace(config.precision, fallback="error")), "cuda")
    (problem,) = refused.value.problems
    assert all(word in problem.cause for word in told)
    assert "precision.fallback=allow trains in bf16" in problem.remedy


@pytest.mark.parametrize(
    ("version", "reason"), [("13.0", "there is no CUDA GPU"), (None, "this torch was built without CUDA")]
)
def test_72_no_gpu_and_a_torch_without_cuda(monkeypatch, version, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    plan = resolve(compose.preflight(["model=gpt2"])[0], "cpu")
    assert (plan.ran, plan.reason) == ("fp32", reason)
