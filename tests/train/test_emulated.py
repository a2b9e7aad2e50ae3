"""What is particular to runs in emulated FP8: what they say, need and save. The rest is in test_fp8_layers.py."""

import pytest

from gpt2_fp8.checkpoint.files import read
from tests.runs import checkpoint, summary, train

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=emulated"]


def test_log_and_summary_say_what_is_emulated(tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(tmp_path, *FP8, "precision.emulate=[weight,head]", "trainer.max_steps=3", "trainer.val_check_interval=3")
    said = dict(message.split(maxsplit=1) for message in caplog.messages if " " in message)
    assert said["layers"] == "FP8 emulated in plain torch; emulated weight, head; attention torch's flash kernel"
    assert said["precision"] == "fp8_hybrid, recipe delayed, evaluation bf16"
    found = summary(tmp_path)
    told = {"asked": "fp8_hybrid", "ran": "fp8_hybrid", "reason": None, "last_in_bf16": 0}
    assert found["precision"] == told
    assert (found["recipe"], found["kernels"]["emulated"]) == ("delayed", "weight, head")


def test_scales_are_saved_with_their_settings(tmp_path, caplog):
    train(tmp_path, *FP8)
    scaling = read(checkpoint(tmp_path, 12))["training_step"]["scaling"]
    assert "emulated" in scaling["settings"]
    assert "'wgrad_input'" in scaling["settings"]
    assert scaling["scales.scaling_fwd.scale"].numel() == 2 * 5
    assert scaling["scales.scaling_bwd.amax_history"].shape == (16, 4)
    assert (scaling["scales.scaling_bwd.amax_history"][1:12] > 0).all()
