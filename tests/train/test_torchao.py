"""Runs with torchao's layers, compiled and on a CPU, where only tests emulate them; more in test_fp8_layers.py."""

import pytest

from tests.runs import summary, train

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=torchao"]


@pytest.mark.slow  # 50 s, nearly all of them torch.compile
@pytest.mark.usefixtures("emulating_torchao")
def test_it_can_be_compiled(tmp_path):
    """Inductor leaves out roundings between operations, so the losses are near and not equal."""
    words = ["trainer.max_steps=4", "trainer.val_check_interval=4", "activation_checkpointing=mlp"]
    plain, compiled = (train(tmp_path / f"compile_{c}", *FP8, *words, f"compile={c}") for c in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=0.01)
    assert summary(tmp_path / "compile_true")["kernels"]["layers"] == "torchao's float8, compiled"


def test_a_run_on_a_cpu_does_not_emulate(tmp_path):
    train(tmp_path, *FP8, "trainer.max_steps=3", "trainer.val_check_interval=3")
    found = summary(tmp_path)["precision"]
    assert found["ran"] == "fp32"
    assert "no FP8" in found["reason"] or "no CUDA" in found["reason"] or "without CUDA" in found["reason"]
