"""Faults 71 and 72: no Transformer Engine, or one that does not load; a GPU too old."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.fp8.resolve import resolve

BROKEN = {
    "OSError('libcublas.so.13: cannot open shared object file: No such file or directory')": "libcublas.so.13",
    "RuntimeError('TransformerEngine was built for\\n CUDA 12,\\n and this is 13')": "built for CUDA 12, and",
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU that could do FP8; no module of a pretended Transformer Engine outlives the test."""
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr("gpt2_fp8.compat.torchao.why_not", lambda: "torchao is not installed")
    yield monkeypatch
    for name in _imported():
        del sys.modules[name]


def _imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose.preflight(["model=gpt2"])[0]


def check_falls_back(config: RunConfig, word: str) -> None:
    """bf16 with the reason on one line; and 2 where that was not wanted."""
    plan = resolve(config, "cuda")
    assert (plan.asked, plan.ran, plan.backend.name) == ("fp8_hybrid", "bf16", "reference")
    assert plan.reason is not None
    assert word in plan.reason
    assert plan.reason.isprintable()
    assert len(plan.reason) < 300
    with pytest.raises(UserError) as told:
        resolve(replace(config, precision=replace(config.precision, fallback="error")), "cuda")  # type: ignore[type-var,arg-type]
    (problem,) = told.value.problems
    assert word in problem.cause
    assert "precision.fallback=allow trains in bf16" in problem.remedy


def stub(folder: Path, gpu: pytest.MonkeyPatch, program: str) -> None:
    """A transformer_engine of our own that does `program` when it is imported."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine/__init__.py").write_text("")
    (folder / "transformer_engine/pytorch.py").write_text(program)
    gpu.syspath_prepend(folder)


@pytest.mark.parametrize("error", BROKEN)
def test_71_a_transformer_engine_that_does_not_load(
    tmp_path: Path, gpu: pytest.MonkeyPatch, config: RunConfig, error: str
) -> None:
    stub(tmp_path, gpu, f"raise {error}")
    check_falls_back(config, BROKEN[error])
    check_falls_back(config, f"Transformer Engine does not load: {error.partition('(')[0]}")


def test_72_a_gpu_too_old(gpu: pytest.MonkeyPatch, config: RunConfig) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    check_falls_back(config, "compute capability 8.6, and FP8 needs 8.9")


def test_72_no_gpu_and_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, word in (("13.0", "there is no CUDA GPU"), (None, "this torch was built without CUDA")):
        monkeypatch.setattr(torch.version, "cuda", version)
        plan = resolve(config, "cpu")
        assert (plan.ran, plan.reason) == ("fp32", word)
